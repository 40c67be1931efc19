"""What other packages may import of the controller: its HTTP client, and its calls."""

"""What calls do, over HTTP against a controller in this process."""

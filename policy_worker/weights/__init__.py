"""Weight versions as the trainer publishes them."""

"""The autoscaler: by hand-made numbers, by properties, and with a simulated fleet."""

"""The REST API: one router per concern, each made for one controller; services and messages have the same names."""

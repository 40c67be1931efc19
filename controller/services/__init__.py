"""The services say what a call does: one service per concern, of the same name as its routes."""

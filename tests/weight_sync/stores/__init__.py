"""stores: one line saying what this folder holds (write it)."""

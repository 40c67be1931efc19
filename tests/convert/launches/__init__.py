"""Jobs as people start them, by words and scripts."""

"""From a lease to a pushed group: how many, prompts to tokens, generation, scoring, pushing."""

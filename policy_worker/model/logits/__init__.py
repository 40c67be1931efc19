"""From the last hidden states to log-probs: the output head, chunks of logits, and what tokens were drawn from."""

"""The training loop and a training step: GRPO and SFT, the plan of a batch, its source."""

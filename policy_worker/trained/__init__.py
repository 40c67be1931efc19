"""Models that learn, with the frozen ones next to them, and the verbs of a training step.

model      forward, backward and optimizer step of a model that learns
trainer    the policy, and all models of a rank
critic     the value model
frozen     the policy as it was, as a reference model
ema        a moving average of the weights
place      where a model is computed
optim, lr_schedule      the optimizers of a model, and their learning rate
"""

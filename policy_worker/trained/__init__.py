"""Models that learn, with the frozen ones next to them, and the verbs of a training step.

model      forward, backward and optimizer step of a model that learns
trainer    the policy, all models of a rank, and a moving average of the weights
critic     the value model
frozen     the policy as it was, as a reference model
model_mesh where a model is computed
optim, lr_schedule      the optimizers of a model, and their learning rate
"""

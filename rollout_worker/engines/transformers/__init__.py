"""The embedded engine: a transformers model decoded by a loop of our own, for machines without vLLM.

engine      the thread and its contract with the worker loop
scheduler   what to admit, and when an update interrupts: pure decisions
decoder     the running samples: admit, step, recompute
window      the key-value cache: rows aligned at one column;  views: how the model reads and writes it
attention   the attention function;  sampler: logits to tokens;  stops: when a sample ends
model       loading, self-test, weights;  settings: what it needs of the configuration
"""

from rollout_worker.engines.transformers.engine import TransformersEngine, build

__all__ = ["TransformersEngine", "build"]

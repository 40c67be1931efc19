"""Where the batch of a step comes from, and how it is cut.

source       asks the controller for tables and payloads, and checks them
prefetch     the next batch, while a step trains
recording    batches that are kept on disk, and read again
cutting      mini- and micro-batches, and who computes which
"""

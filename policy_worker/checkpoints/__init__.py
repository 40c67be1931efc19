"""Checkpoints: everything that a trainer needs to go on, and what the controller needs of its ledger.

    layout          what lies where; the manifest               when, keep, contents   decisions, as pure functions
    storage, state  tensors ─▶ safetensors, any number of ranks  find     which one to resume from
    rng             random states                                load     reading it into a trainer
    directory       beside, rename, `latest`, cleaning up        write    one checkpoint, whole or not at all
    verify          sizes and hashes                             saver    what the training loop speaks to

A checkpoint is complete or it does not exist: it is written beside, read again, renamed, and only then pointed at;
only then is the controller told, which may now forget payloads; only then do older ones go.

Modules are imported by name: uploads know the layout without torch, and the saver knows uploads.
"""

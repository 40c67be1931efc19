"""Checkpoints: everything that a trainer needs to go on, and what the controller needs of its ledger.

    layout          what lies where; the manifest, and proof that files are what was written
    storage, state  tensors ─▶ safetensors, any number of ranks; random states
    directory       hidden while written, rename, `latest`, cleaning up
    save            when, and what the training loop speaks to       find       which one to resume from
    write           one checkpoint, whole or not at all              load       reading it into a trainer
    retention       which ones stay                                  uploads    copies on S3 and the hub

A checkpoint is complete or it does not exist: it is written under a hidden name, read again, renamed, and only then
pointed at; only then is the controller informed, which may now forget payloads; only then do older ones go.

Modules are imported by name: uploads know the layout without torch, and `save` knows uploads.
"""

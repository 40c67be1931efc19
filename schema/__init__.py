"""This package holds what all parts of cosmos-launch share: the configuration tree, the wire formats and their
JSON-schema export.

Imports pydantic, numpy and safetensors at most; never torch, transformers or another package of this tree,
so that the controller and the command line start in a fraction of a second.
"""

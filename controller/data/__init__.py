"""Data preparation: from a dataset's rows to one indexed file of token ids.

    reading/  ->  rows (dicts)  ->  split  ->  conversations.py  ->  data/*.safetensors

It runs in a process of its own (`python -m controller.data.prepare`), so that the controller never loads a
tokenizer: it serves positions of the finished file.
"""

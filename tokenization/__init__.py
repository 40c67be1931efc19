"""Tokenizers of cosmos-launch: every process of a job loads them alike, compared with their files.

`loading` loads one, and writes it out for programs that load by themselves. Without torch of its own: where a class
of transformers is needed, transformers may import it.
"""

"""Tokenizers: loaded in one way by every process of a job, and compared with their files before they are used.

`loading` loads one, and writes it out for programs that load by themselves; `comparison` has the probe texts and says
what two tokenizers differ in. Without torch of its own: where a class of transformers is needed, transformers may
import it.
"""

"""The sections of `benchmarks/gpu/run.py`, one module each, run as `python -m benchmarks.gpu.sections SECTION`.

A section is a function `run(bench)`. It measures on `bench.device`, in the sizes that `bench.tiny` asks for, and
reports each result as soon as it has it (`bench.row`), so that one which is cut short has reported something. What
it checks (`bench.check`) is right or wrong whatever the time. A new one is a module here and a row of `SECTIONS`.
"""

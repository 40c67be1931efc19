"""The load of `benchmarks/controller/throughput.py`: simulated replicas that cost next to nothing, and a naive rival.

`wire` is a bare HTTP/1.1 client, `bodies` makes requests by patching prebuilt bytes, `generator` is the process
that plays N rollout replicas and one policy replica, `naive` the same flow as JSON and the service that takes it,
`seed` fills a ledger, `servers` starts and watches the processes.
"""

"""The load of `benchmarks.controller.throughput`: simulated replicas that cost next to nothing, and a naive rival.

`wire` is a bare HTTP/1.1 client, `bodies` makes requests by patching prebuilt bytes, `generator` is the process
that plays N rollout replicas and one policy replica, `naive` the service that takes the same flow as JSON,
`seed` fills a ledger, `servers` starts and watches the processes.
"""

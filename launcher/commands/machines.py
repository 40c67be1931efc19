"""Commands of machines that work for a job of another: a replica that joins, a pod, the number of pods."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from launcher.errors import LaunchError
from launcher.pods.api_server import ACCOUNT, ApiServer
from launcher.processes.signals import ended_at_once, ended_by_exit
from launcher.restarts import EXIT_OK, Role


def join(
    run: Annotated[
        str, typer.Argument(metavar="RUN_DIR", help="The job's run directory, which this machine shares.")
    ],
    name: Annotated[
        str,
        typer.Option("--name", help="Name of the replica, the same when it comes back. Unset: by host and process."),
    ] = "",
    policy: Annotated[
        bool,
        typer.Option(
            "--policy", help="A policy replica, of a job that has several (policy.parallelism.n_init_replicas)."
        ),
    ] = False,
    wait: Annotated[
        float, typer.Option("--wait", min=0.0, metavar="SECONDS", help="Wait so long for the job to be there.")
    ] = 0.0,
) -> None:
    """Add a rollout replica to a job that runs, on the GPUs of CUDA_VISIBLE_DEVICES; Ctrl-C lets it leave.

    With --policy a trainer, which gets parts of each batch from one of the next steps on. A replica is started again
    when it crashes, as the job's own are, and ends with the job. Its log is in the run directory.
    """
    with ended_at_once():
        from launcher.nodes.join import serve
        from launcher.plan.rundir import RunDir

    place = RunDir(Path(run).expanduser().absolute())
    raise typer.Exit(serve(place, Role.POLICY if policy else Role.ROLLOUT, name, wait, os.environ))


def pod(
    role: Annotated[Literal["controller", "policy", "rollout"], typer.Argument(help="What this pod is of the job.")],
    config: Annotated[
        Path, typer.Option("--config", "-c", metavar="FILE", help="The resolved configuration, as JSON.")
    ],
    stay: Annotated[
        bool,
        typer.Option("--stay", help="When the job is over, wait for SIGTERM: for pods that are always restarted."),
    ] = False,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep", metavar="DIR", help="Folder that outlives containers of this pod, and no other pod sees."
        ),
    ] = None,
) -> None:
    """Run one pod of a job on Kubernetes; manifests that `--target kubernetes` writes start it."""
    with ended_by_exit():
        from launcher.pods.pod import run_pod

        code = run_pod(Role(role), config, stay=stay, keep=keep)
    raise typer.Exit(code)


def autoscale(
    namespace: Annotated[str, typer.Option("--namespace", metavar="NAME", help="Where the pods are.")],
    controller: Annotated[
        str, typer.Option("--controller", metavar="URL", help="Of the job; COSMOS_TOKEN is any token of it.")
    ],
    deployment: Annotated[
        str, typer.Option("--deployment", metavar="NAME", help="The Deployment of rollout pods that follows.")
    ] = "",
    leader_worker_set: Annotated[
        str,
        typer.Option(
            "--leader-worker-set",
            metavar="NAME",
            help="The LeaderWorkerSet that follows instead, where an engine has several pods.",
        ),
    ] = "",
    costs: Annotated[
        str,
        typer.Option(
            "--costs",
            metavar="SELECTOR",
            help="Labels of the rollout pods (KEY=VALUE,…) whose deletion cost is kept at their work in hand.",
        ),
    ] = "",
    interval: Annotated[
        float, typer.Option("--interval", min=0.05, metavar="SECONDS", help="Between two looks.")
    ] = 5.0,
    account: Annotated[
        Path, typer.Option("--account", metavar="DIR", help="With token and ca.crt of the service account.")
    ] = ACCOUNT,
) -> None:
    """Let the cluster follow the number of rollout replicas that the controller asks for; SIGTERM ends it."""
    with ended_at_once():
        import asyncio

        from launcher.pods.autoscale import GROUPS, Scale, ScaleFollower, until_a_signal
        from launcher.pods.costs import Costs

    token = os.environ.get("COSMOS_TOKEN", "")
    if not token:
        raise LaunchError("COSMOS_TOKEN is not set", "set it to the rollout token of the job")
    if deployment and leader_worker_set:
        raise LaunchError("--deployment and --leader-worker-set are both there", "name the one that follows")
    if not deployment and not leader_worker_set and not costs:
        raise LaunchError(
            "none of --deployment, --leader-worker-set and --costs says what to do",
            "name the Deployment of rollout pods",
        )
    server = ApiServer.of_this_pod(account)
    path = f"apps/v1/namespaces/{namespace}/deployments/{deployment}"
    if leader_worker_set:
        path = f"{GROUPS}/namespaces/{namespace}/leaderworkersets/{leader_worker_set}"
    follower = ScaleFollower(
        server,
        Scale(server, path) if deployment or leader_worker_set else None,
        Costs(server, namespace, costs) if costs else None,
    )
    asyncio.run(until_a_signal(follower, controller, token, interval))
    raise typer.Exit(EXIT_OK)

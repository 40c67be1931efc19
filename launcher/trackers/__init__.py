"""Trackers: the metrics of a run, where people look at them. A process of its own follows the run's event file.

    events.jsonl ─▶ follow.Follower, a thread for each tracker ─▶ sinks: tensorboard, wandb, mlflow, swanlab, trackio

What a tracker shows is what `GET /v1/steps` says, number by number: after a rewind it begins anew and gets the steps
that still count. A tracker that fails or hangs is reported once and tried again; it never holds up the run.

    sinks      the small interface, and what each library wants
    tables     answers as rows and columns
    follow     which steps a tracker has to get
    __main__   the process: `python -m launcher.trackers RUN_DIR`, ends when its standard input does
"""

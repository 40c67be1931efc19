"""Copies of checkpoints and of the final model on S3 and on the Hugging Face hub, made while training goes on.

    offer(path) ─▶ queue ─▶ one thread: whole? ─▶ record on disk ─┬─▶ s3   multipart, resumed where it stopped
                                                              └─▶ hub  a commit per checkpoint
resume()    ─▶ the checkpoints that are there ─▶ queue; what its record calls done is passed over
finish()    ◀─ everything is there, or UploadError

uploader       the queue, its thread, and what the trainer asks
upload_record  what is on its way, in files next to the checkpoints: survives kill -9
s3, hub        the two targets

Training never waits for an upload. One that fails for good is reported (`Uploader.trouble`, which heartbeats carry to
the job's last error), the run goes on, and nothing is deleted; only when the final one fails does the trainer end
with an error, and `cosmos-launch --resume` tries again. Rank 0 uploads: it sees the files of all ranks.
"""

from policy_worker.checkpoints.uploads.uploader import Uploader, make_uploader

__all__ = ["Uploader", "make_uploader"]

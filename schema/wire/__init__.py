"""The formats of what travels between the processes: frames of bytes, samples, REST messages, weight manifests.

`frame` is the container (safetensors), `sample` what one completion looks like inside it, `batch` the table
and payloads of one training step, `messages` the JSON bodies of the REST API, `weights` the description of a
published weight version.
"""

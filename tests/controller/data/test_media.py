"""Rows with images, videos or sounds are refused by name, and rows of text are not; a user may say all are text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controller.data import first_rows
from controller.data.errors import DataError
from controller.data.prepare import prepare
from tests.controller.data.conftest import write
from tests.controller.data.test_prepare import config

PNG = b"\x89PNG"
MEDIA: list[tuple[dict[str, Any], str]] = [
    ({"images": [{"bytes": PNG, "path": None}]}, "the column `images` has a value"),
    ({"images": ["a.png"]}, "the column `images` has a value"),
    ({"image": {"bytes": None, "path": "a.png"}}, "the column `image` has a value"),
    ({"videos": ["a.mp4"]}, "the column `videos` has a value"),
    ({"audio": "a.wav"}, "the column `audio` has a value"),
    ({"prompt": "<image>How many?"}, "its prompt has <image>"),
    ({"prompt": "<image 2> How many?"}, "its prompt has <image 2>"),
    ({"prompt": "<|vision_start|><|image_pad|><|vision_end|>?"}, "its prompt has <|vision_start|>"),
    ({"prompt": [{"role": "system", "content": "See <image>."}]}, "its prompt has <image>"),
    ({"prompt": "<image-1> and <Image2>"}, "its prompt has <image-1>"),
    ({"prompt": "<|AUDIO|> Who speaks?"}, "its prompt has <|AUDIO|>"),
    ({"prompt": "<video>What happens?", "clip": "a.mp4"}, "its prompt has <video>, and the column `clip`"),
    ({"images": "None"}, "the column `images` has a value"),
    ({"image": "data/My Cat.JPG"}, "the column `image` has a value"),
    ({"image": {"path": "0001", "bytes": None}}, "the column `image` has a value"),
    ({"image": ["https://a.b/photo?id=3"]}, "the column `image` has a value"),
    ({"image": "iVBORw0KGgo" + "A" * 40}, "the column `image` has a value"),
    ({"image_url": {"url": "data:image/png;base64,AAAA"}}, "the column `image_url` has a value"),
    ({"image_path": "train/1"}, "the column `image_path` has a value"),
    ({"multi_modal_data": {"image": ["1"]}}, "the column `multi_modal_data` has a value"),
    ({"prompt": [{"role": "user", "content": "?", "images": ["a.png"]}]}, "a turn of its prompt has images"),
    ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "content of type image is not supported"),
]
TEXT: list[dict[str, Any]] = [
    {"images": None, "videos": [], "audio": ""},
    {"images": [{"bytes": None, "path": None}]},
    {"images": 0, "image": False},
    {"prompt": 'What does <img src="a.png"> do, or <imagine>, or image?'},
    {"prompt": "How do I use the <video> tag and <audio> in HTML?", "url": "https://a.b/questions/1"},
    {"prompt": "How do I style <Image> of React Native?", "day": "2024-01-01"},
    {"image": "swebench/sweb.eval:latest", "video": "None", "audio": " ", "image_url": "null"},
]


@pytest.mark.parametrize(("row", "fault"), MEDIA)
def test_media_are_refused_by_name(model_dir: Path, tmp_path: Path, row: dict[str, Any], fault: str) -> None:
    path = write(tmp_path / "rows.parquet", [{"prompt": "2 + 2?", **row}])
    with pytest.raises(DataError) as refusal:
        prepare(config(model_dir, path, {}), tmp_path)
    assert fault in str(refusal.value)
    assert str(path) in str(refusal.value)
    with pytest.raises(DataError, match=r"rows\.parquet, row 1"):
        first_rows.prepare(config(model_dir, path, {}), tmp_path, 1)


@pytest.mark.parametrize("row", TEXT)
def test_text_is_text(model_dir: Path, tmp_path: Path, row: dict[str, Any]) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "2 + 2?", **row}])
    assert prepare(config(model_dir, path, {}), tmp_path) == {"train": 1}


def test_the_column_is_that_of_the_config(model_dir: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "2 + 2?", "pictures": ["a.png"]}])
    assert prepare(config(model_dir, path, {}), tmp_path) == {"train": 1}
    named = config(model_dir, path, {"dataset": {"image_column_name": "pictures"}})
    with pytest.raises(DataError, match=r"row 1: the column `pictures` has a value.*image_column_name = \"\""):
        prepare(named, tmp_path)


@pytest.mark.parametrize("row", [row for row, fault in MEDIA if "bytes" not in str(row) and "type" not in fault])
def test_a_user_may_say_that_all_rows_are_text(model_dir: Path, tmp_path: Path, row: dict[str, Any]) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "2 + 2?", **row}])
    policy = {"dataset": {"image_column_name": ""}}
    assert prepare(config(model_dir, path, policy), tmp_path) == {"train": 1}


def test_conversations_and_held_out_data_are_looked_at_too(model_dir: Path, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Write a page."}, {"role": "assistant", "content": "<video></video>"}]
    text = write(tmp_path / "text.jsonl", [{"conversations": talk}])
    sft: dict[str, Any] = {"type": "sft"}
    assert prepare(config(model_dir, text, sft), tmp_path) == {"train": 1}, "an answer may well write of them"
    seen = write(tmp_path / "seen.jsonl", [{"conversations": talk, "images": ["a.png"]}])
    with pytest.raises(DataError, match=r"train.train_policy.dataset.image_column_name"):
        prepare(config(model_dir, seen, sft), tmp_path)
    held_out: dict[str, Any] = {"enable": True, "dataset": {"name": str(seen)}}
    with pytest.raises(DataError, match=r" validation.dataset.image_column_name"):
        prepare(config(model_dir, text, sft, validation=held_out), tmp_path)

"""pretrain_gpt.py with its checkpoints in an object store, under the policies that its flags give."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from training.arguments import Arguments

from megackpt import Checkpointer
from megackpt.testing.ranks import RankPool
from tests.support.s3_server import ACCESS_KEY, BUCKET, SECRET, S3Server, options_for
from tests.system.examples.training_runs import (
    LAYOUTS,
    arguments_for,
    events_of,
    metrics_of,
    run_trainer,
    train,
    write_text,
)

POLICIES = [
    "--save-interval=1",
    "--save-interval-seconds=1000",
    "--keep-last=1",
    "--keep-every=2",
    "--verify-after-save",
    "--on-save-error=warn",
]


def contiguous_bytes(environment: dict[str, str], arguments: Arguments) -> None:
    """Train in a worker rank that has other variables of the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        run_trainer(arguments)


def test_a_run_resumed_from_an_object_store_is_the_uninterrupted_one_bit_for_bit(
    rank_pool: RankPool, s3_server: S3Server, tmp_path: Path
) -> None:
    flags = [f"--data={write_text(tmp_path / 'text')}", "--steps=5", "--dropout=0.1"]
    url, options = f"s3://{BUCKET}/{uuid.uuid4().hex}", options_for(s3_server.port)
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3_server.port}",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }
    asked = [*flags, *POLICIES, f"--ckpt={url}", f"--metrics={tmp_path}/metrics.jsonl"]
    for until in (3, 5):
        arguments = arguments_for(LAYOUTS["1 rank"], [*asked, f"--exit-after={until}"])
        rank_pool.run(contiguous_bytes, 1, environment, arguments)

    train(rank_pool, "1 rank", tmp_path / "whole", *flags)
    assert metrics_of(tmp_path) == metrics_of(tmp_path / "whole")
    assert events_of(tmp_path, "start")[1]["note"].startswith(f"resumed step 3 from {url}/iter_0000003")
    assert Checkpointer(url, objects=options).steps() == (2, 4, 5)

from __future__ import annotations

import pytest

from torchweft.cli.main import main

yaml = pytest.importorskip("yaml")

IMAGE = ["--image", "r/train:1", "--job-name", "demo"]


def test_a_manifest_says_how_to_make_its_secret(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--namespace", "team", "--env", "A=b=c", "-n", "2", "-m", "package.train", "--lr", "1"]
    assert main(["manifest", *IMAGE, *more]) == 0
    text = capsys.readouterr().out
    assert (
        "kubectl create secret generic demo-secret --namespace team --from-file=secret=FILE" in text
    )
    (job,) = yaml.safe_load_all(text)
    spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["command"] == ["python", "-m", "package.train", "--lr", "1"]
    assert {"name": "A", "value": "b=c"} in container["env"]
    assert not [token for token in yaml.scan(text) if isinstance(token, yaml.AnchorToken)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "2", "a.py"], "there is no image"),
        ([*IMAGE, "a.py"], "say how many workers"),
        ([*IMAGE, "-n", "2"], "there is no script"),
        ([*IMAGE, "-n", "2", "--env", "A", "a.py"], "--env is 'A'; write it as NAME=VALUE"),
    ],
)
def test_what_is_missing(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["manifest", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("torchweft manifest: ")
    assert message in said

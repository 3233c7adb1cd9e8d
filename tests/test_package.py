"""The package of users: public names, the command, and a wheel outside the checkout."""

from __future__ import annotations

import base64
import hashlib
import re
import runpy
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import moe_ckpt
from moe_ckpt import cli
from scripts.write_configuration import PAGE, ROOT, page


def run(*command: str, cwd: Path) -> str:
    return subprocess.run(
        command, cwd=cwd, check=True, capture_output=True, text=True
    ).stdout


def test_every_public_name_is_there_and_no_other() -> None:
    for name in moe_ckpt.__all__:
        assert getattr(moe_ckpt, name) is not None
    with pytest.raises(AttributeError, match=r"moe_ckpt.*no attribute 'attached'"):
        moe_ckpt.attached  # noqa: B018


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_a_program(name: str) -> None:
    module = ROOT.joinpath(*cli.program(name).split("."))
    assert module.with_suffix(".py").exists() or module.is_dir()
    assert name in cli.usage()


def test_an_unknown_command_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulat"]) == 2
    assert (
        capsys.readouterr().err
        == f"moe-ckpt: got simulat, wanted one of {', '.join(cli.COMMANDS)}\n"
    )


@pytest.mark.parametrize("missing", ["omegaconf", "hydra.core"])
def test_a_command_without_the_launchers_packages_is_one_error(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_module(*_: object, **__: object) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(runpy, "run_module", run_module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    assert cli.main(["check", "--help"]) == 2
    name = missing.partition(".")[0]
    wanted = (
        f"moe-ckpt check: got no package {name}, wanted the launcher's: pip install"
        " 'moe-ckpt[launcher]'\n"
    )
    assert capsys.readouterr().err == wanted


def test_another_missing_package_is_an_error_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_module(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'pandas'", name="pandas")

    monkeypatch.setattr(runpy, "run_module", run_module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    with pytest.raises(ModuleNotFoundError, match="pandas"):
        cli.main(["check"])


def test_the_page_of_settings_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "python scripts/write_configuration.py writes it"


@pytest.mark.full
def test_the_wheel_records_every_file_and_runs_nothing_at_the_start_of_python(
    tmp_path: Path,
) -> None:
    """The unpacked wheel equals the files that `pip install` puts into site-packages.

    In site-packages, Python reads all .pth files at its start.
    """
    run(
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "-o",
        str(tmp_path),
        str(ROOT),
        cwd=tmp_path,
    )
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        opened.extractall(site)
    (record,) = site.glob("moe_ckpt-*.dist-info/RECORD")
    rows = [line.rsplit(",", 2) for line in record.read_text().splitlines()]
    assert {name for name, _, _ in rows} == names
    for name, digest, size in rows:
        content = (site / name).read_bytes()
        recorded = (
            base64.urlsafe_b64encode(hashlib.sha256(content).digest())
            .rstrip(b"=")
            .decode()
        )
        is_recorded = (digest, size) == (f"sha256={recorded}", str(len(content)))
        assert is_recorded or name == f"{record.parent.name}/RECORD", name
    assert [name for name in names if name.endswith(".pth")] == []
    assert {name.split("/")[0] for name in names} == {"moe_ckpt", record.parent.name}
    assert {path.name for path in (ROOT / "moe_ckpt").glob("*.py")} <= {
        Path(name).name for name in names
    }
    found = (
        f"import site; site.addsitedir({str(site)!r}); import moe_ckpt.door;"
        " print(moe_ckpt.door.__file__)"
    )
    outside = run(sys.executable, "-I", "-S", "-c", found, cwd=tmp_path)
    assert Path(outside.strip()) == site / "moe_ckpt" / "door.py"


@pytest.mark.full
def test_a_wheel_outside_the_checkout_simulates_and_shows_its_settings(
    tmp_path: Path,
) -> None:
    run(
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "-o",
        str(tmp_path),
        str(ROOT),
        cwd=tmp_path,
    )
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "empty", with_pip=True)
    python = str(tmp_path / "empty" / "bin" / "python")
    run(python, "-m", "pip", "install", "-q", "--no-deps", str(wheel), cwd=tmp_path)
    # the dependencies come from this environment; Python does not follow the
    # environment's link to the checkout
    packages = next((tmp_path / "empty" / "lib").glob("python*/site-packages"))
    (packages / "dependencies.pth").write_text(
        str(Path(pytest.__file__).parents[1]) + "\n"
    )

    command = str(tmp_path / "empty" / "bin" / "moe-ckpt")
    assert run(command, "--version", cwd=tmp_path) == f"{moe_ckpt.__version__}\n"
    assert "The best policy that loses no tokens" in run(
        command,
        "simulate",
        "plan=true",
        "model=tiny",
        "cluster=local",
        "mtbf_s=600",
        cwd=tmp_path,
    )
    assert "global_batch_size" in run(command, "train", "--help", cwd=tmp_path)
    names = {path.name for path in packages.iterdir()}
    assert not names & {"launcher", "conf", "tests", "scripts"}
    assert re.search(
        r"done: .* digest \w+",
        run(
            command, "train", "--nproc-per-node=1", "train.iterations=12", cwd=tmp_path
        ),
    )

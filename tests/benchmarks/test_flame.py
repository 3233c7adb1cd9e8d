"""The flame graph counts the training thread's samples, by function and by hook."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.flame import draw, lines, read_stacks, share_of, tree_of

LOOP = (
    "thread (7): MainThread;main (train.py:9);GenerationLoop.run"
    " (moe_ckpt/engine/worker_loop.py:80)"
)
RAW = f"""\
{LOOP};forward (model.py:3);_call_impl (torch/nn/modules/module.py:5);matmul (model.py:8) 6
{LOOP};forward (model.py:4) 1
{LOOP};Session.gradients_ready (moe_ckpt/engine/session.py:70);Session._vote (moe_ckpt/engine/session.py:90) 3
thread (8): host-copier_0;copy (moe_ckpt/snapshot/copier.py:50) 90
"""


def test_threads_beside_the_training_thread_do_not_count() -> None:
    stacks = read_stacks(RAW)
    assert sum(stacks.values()) == 10
    assert share_of(stacks, "Session.gradients_ready") == pytest.approx(0.3)
    assert share_of(stacks, "Session.step_committed") == 0.0
    assert "| `gradients_ready` | 30.00% |" in lines(stacks)


def test_lines_of_one_function_are_one_frame_without_what_passes_on() -> None:
    [loop] = tree_of(read_stacks(RAW)).called.values()
    forward = loop.called["forward (model.py)"]
    assert (forward.samples, list(forward.called)) == (7, ["matmul (model.py)"])


def test_the_figure_has_a_box_for_each_frame() -> None:
    figure = ElementTree.fromstring(draw(tree_of(read_stacks(RAW))))
    titles = [
        element.text for element in figure.iter() if element.tag.endswith("title")
    ]
    assert "Session._vote (moe_ckpt/engine/session.py): 30.0%" in titles
    assert len(titles) == 5

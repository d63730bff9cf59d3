import pytest

from server_app.launch.console import LogLines


def shown(*lines: str, colour: bool = False) -> list[str]:
    reader = LogLines(colour=colour)
    return [out for line in lines for out in reader.take(line)] + list(reader.rest())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("\x1b[92mINFO \x1b[0m:      run folder: /r", ["run folder: /r"]),
        (
            "\x1b[36m(ClientAppActor pid=185)\x1b[0m \x1b[92mINFO \x1b[0m:      client-001: epoch 1",
            ["client-001: epoch 1"],
        ),
        ("\x1b[93mWARNING \x1b[0m:   refused client-002: NaN", ["WARNING refused client-002: NaN"]),
        ('  File "x.py", line 3', ['  File "x.py", line 3']),
        ("\x1b[92mINFO \x1b[0m:      ", []),
        ("\x1b[92mINFO \x1b[0m:      To change federation size, use the following command:", []),
        ("\x1b[91mERROR \x1b[0m:     Exit Code: 700", []),
        ("Using SuperLink: oneshot (127.0.0.1:37881)", []),
        ("Successfully installed oneshot-fl to /somewhere.", []),
    ],
)
def test_take_keeps_readable_characters(line: str, expected: list[str]) -> None:
    assert shown(line) == expected


def test_take_writes_out_control_characters() -> None:
    line = "\x1b[93mWARNING \x1b[0m:   eve: \x1b]0;title\x07\x1b[2J\x9b31m\u202e"
    assert shown(line) == [r"WARNING eve: \x1b]0;title\x07\x1b[2J\x9b31m\u202e"]


TRACE = ["Traceback (most recent call last):", '  File "a.py", line 1, in main', "    run()", "    ^^^^^"]


def test_take_of_a_traceback_of_ours_shows_nothing_of_it() -> None:
    error = "strategies.core.errors.QuorumError: 1 uploads arrived, min-uploads is 2."
    assert shown("before", *TRACE, error, "after") == ["before", "after"]

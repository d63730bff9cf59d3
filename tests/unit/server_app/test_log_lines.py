import pytest

from server_app.log_lines import tidy


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("\x1b[92mINFO \x1b[0m:      run folder: /r", "run folder: /r"),
        (
            "\x1b[36m(ClientAppActor pid=185)\x1b[0m \x1b[92mINFO \x1b[0m:      client-001: epoch 1",
            "client-001: epoch 1",
        ),
        ("\x1b[93mWARNING \x1b[0m:   refused client-002: NaN", "WARNING refused client-002: NaN"),
        ("Traceback (most recent call last):", "Traceback (most recent call last):"),
        ('  File "x.py", line 3', '  File "x.py", line 3'),
        ("\x1b[92mINFO \x1b[0m:      ", None),
        ("\x1b[92mINFO \x1b[0m:      To change federation size, use the following command:", None),
    ],
)
def test_tidy_keeps_what_a_reader_wants(line: str, expected: str | None) -> None:
    assert tidy(line, colour=False) == expected


def test_tidy_for_a_terminal_colours_warnings_only() -> None:
    assert tidy("WARNING : careful", colour=True) == "\x1b[33mWARNING\x1b[0m careful"
    assert tidy("INFO : fine", colour=True) == "fine"

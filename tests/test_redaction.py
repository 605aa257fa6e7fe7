# SPDX-License-Identifier: Apache-2.0
"""Secrets stay out of everything that a run writes, and all other text stays readable."""

from __future__ import annotations

import io
import json
import pprint
import sys
from typing import IO, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_pipeline.redaction import (
    HIDDEN,
    LineRedactor,
    RedactedStream,
    hide_in_output,
    hider_of,
    looks_secret,
    redacted,
    shown,
)

SECRETS = [
    "api_key",
    "OPENAI_API_KEY",
    "hf_token",
    "HF_TOKEN",
    "token",
    "auth_token",
    "password",
    "db.password",
    "client_secret",
    "aws_secret_access_key",
    "credentials",
    "Authorization",
    "HUGGING_FACE_HUB_TOKEN",
    "http_token",
    "wandb_key",
    "openai_key",
    "azure_storage_key",
    "passphrase",
    "db_pwd",
    "cookie",
    "auth",
    "proxy_auth",
]
NONE = [
    "pad_token",
    "eos_token",
    "tokenizer",
    "num_tokens",
    "max_token_len_per_gpu",
    "token2text",
    "key",
    "prompt_key",
    "monkey",
    "keys",
    "max_tokens",
    "secretary",
    "reward_fn_key",
    "stop_token",
    "batch_num_tokens",
    "tokens",
    "PWD",
    "OLDPWD",
    "author",
    "hf_keyword",
    "image_key",
]


@pytest.mark.parametrize("key", SECRETS)
def test_secret_keys_are_recognised(key: str) -> None:
    assert looks_secret(key)
    assert redacted({"a": [{key: "hunter22"}]}) == {"a": [{key: HIDDEN}]}
    assert shown(f"trainer.{key}", "hunter22") == f"'{HIDDEN}'"
    line = LineRedactor({}).line
    for text in (f"'{key}': 'hunter22'", f'"{key}": "hunter22"', f"+x.{key}=hunter22", f"{key}: hunter22,"):
        assert "hunter22" not in line(f"before {text} after")
        assert line(f"before {text} after").endswith(" after")


@pytest.mark.parametrize("key", NONE)
def test_other_keys_are_left_alone(key: str) -> None:
    assert not looks_secret(key)
    assert redacted({key: "hunter22"}) == {key: "hunter22"}
    assert LineRedactor({}).line(f"'{key}': 'hunter22'") == f"'{key}': 'hunter22'"


@pytest.mark.parametrize("value", [None, "", True, False])
def test_missing_secrets_are_shown_as_missing(value: object) -> None:
    assert redacted({"api_key": value}) == {"api_key": value}


def test_a_section_of_secrets_is_hidden_as_a_whole() -> None:
    assert redacted({"credentials": {"user": "me", "parts": ["x", 3]}}) == {
        "credentials": {"user": HIDDEN, "parts": [HIDDEN, HIDDEN]}
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "step 3/60  reward 0.5",
        "'api_key': None",
        "token: 12",
        "{'a': 1, 'b': [2, 3]}",
        "api_key=null",
        'File "x.py", line 3: token',
    ],
)
def test_lines_without_a_secret_are_unchanged(text: str) -> None:
    assert LineRedactor({"PATH": "/usr/bin"}).line(text) == text


def test_environment_values_are_hidden_anywhere_in_a_line() -> None:
    line = LineRedactor(
        {"WANDB_API_KEY": "0123456789abcdef", "MY_PASSWORD": "short", "HOME_DIR": "visible-all"}
    ).line
    assert line("login with 0123456789abcdef: ok") == f"login with {HIDDEN}: ok"
    assert line("short visible-all") == "short visible-all", (
        "one value is too short to distinguish from words, the other is not a secret"
    )


def test_the_longest_of_overlapping_secrets_is_hidden() -> None:
    assert LineRedactor({"A_TOKEN": "abcdefgh", "B_TOKEN": "abcdefgh-ij"}).line("abcdefgh-ij") == HIDDEN


@given(st.text(max_size=60))
def test_redaction_is_idempotent_for_any_line(text: str) -> None:
    line = LineRedactor({"API_KEY": "0123456789"}).line
    assert line(line(text)) == line(text)
    assert "0123456789" not in line(text + "0123456789")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(JSON)
def test_any_config_keeps_its_shape(value: object) -> None:
    assert redacted(redacted(value)) == redacted(value)
    assert isinstance(redacted(value), type(value))


def test_short_variable_names_and_passwords_in_urls_are_hidden() -> None:
    line = LineRedactor({"OPENAI_KEY": "sk-012345", "DB_PASS": "hunter2222"}).line
    assert (
        line("sk-012345 hunter2222 postgres://me:hidden@db:5432/x")
        == f"{HIDDEN} {HIDDEN} postgres://me:{HIDDEN}@db:5432/x"
    )
    assert (
        line("http://127.0.0.1:8000/v1 me@example.org a://b:c/d@e")
        == "http://127.0.0.1:8000/v1 me@example.org a://b:c/d@e"
    )


@given(
    secret=st.text(min_size=8).filter(lambda text: not text.replace(".", "").isdigit()),
    before=st.text(),
    after=st.text(),
)
def test_a_secret_in_json_is_hidden_and_the_json_stays_valid(secret: str, before: str, after: str) -> None:
    for escaped in (True, False):
        text = hider_of({"MY_TOKEN": secret}, for_programs=True)(
            json.dumps({"why": before + secret + after}, ensure_ascii=escaped)
        )
        assert secret not in json.loads(text)["why"] or secret in HIDDEN + after + HIDDEN + before


def test_a_redacted_stream_hides_secrets_that_arrive_in_pieces() -> None:
    kept = io.StringIO()
    stream = RedactedStream(kept, {"WANDB_API_KEY": "0123456789abcdef"})
    # It only writes, which is all that pprint asks of a stream.
    pprint.pprint({"my_token": "tok-abc-998877", "step": 3}, stream=cast(IO[str], stream))
    assert kept.getvalue() == f"{{'my_token': '{HIDDEN}', 'step': 3}}\n", (
        "pprint writes in pieces; the redactor sees whole lines"
    )
    assert stream.write("half 0123456789") == 15
    assert kept.getvalue().endswith("3}\n")
    stream.write("abcdef of a line\nand")
    assert kept.getvalue().endswith(f"half {HIDDEN} of a line\n")
    stream.flush()
    assert kept.getvalue().endswith("and")
    assert stream.getvalue() == kept.getvalue(), "other attributes are read from the stream"


def test_what_this_process_prints_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    hide_in_output()
    print("api_key=hunter22")  # noqa: T201
    sys.stderr.write("password: hunter22\n")
    assert (out.getvalue(), err.getvalue()) == (f"api_key={HIDDEN}\n", f"password: {HIDDEN}\n")

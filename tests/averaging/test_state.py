"""States and messages come back exactly, and what is malformed is refused in one line."""

from __future__ import annotations

import json
from dataclasses import fields

import numpy as np
import pytest

from flowrl.averaging.state import AgentState, SyncMessage
from flowrl.errors import ConfigError

DTYPES = ["bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64"]
DTYPES += ["uint8", "uint16", "uint32", "uint64"]
STATE = AgentState(
    agent_id="agent é",
    weights={"actor": {"kernel": np.arange(6.0).reshape(2, 3)}, "bias": np.zeros(3, np.float32)},
    gradients=np.array([np.nan, -0.0, np.inf]),
    loss=0.1 + 0.2,
    iteration=7,
    metadata={"rate": float("nan"), "tags": ["a", None, True, 2**70], "deep": {"x": -1.5}},
)
MESSAGE = SyncMessage(
    source_id="a",
    target_ids=("b", "c"),
    message_type="weights",
    payload={"weights": np.random.default_rng(0).normal(size=(5, 2)), "empty": np.zeros((0, 3))},
    timestamp=12.5,
    round=3,
)
WAYS = {
    "dict": lambda one: type(one).from_dict(one.to_dict()),
    "json": lambda one: type(one).from_json(one.to_json()),
    "bytes": lambda one: type(one).from_bytes(one.to_bytes()),
}


def bits(value):
    """A value with its types and the bytes of its arrays, to compare."""
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return (type(value), repr(value))


def content(one):
    return {each.name: bits(getattr(one, each.name)) for each in fields(one)}


def test_a_new_state_has_learned_nothing():
    state = AgentState(agent_id="a", weights=np.ones(3))
    assert (state.gradients, state.loss, state.iteration, state.metadata) == (None, None, 0, {})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("one", [STATE, MESSAGE], ids=["state", "message"])
def test_it_comes_back_with_every_bit(one, way):
    assert content(WAYS[way](one)) == content(one)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_so_do_arrays_of_each_type(dtype, way):
    numbers = np.random.default_rng(0).integers(0, 2, (3, 1, 4)).astype(dtype)
    for array in (numbers, numbers[::2, :, ::-1], numbers[0, 0, 0, ...], numbers.T):
        state = AgentState(agent_id="a", weights=np.asarray(array))
        assert bits(WAYS[way](state).weights) == bits(np.asarray(array))


def test_a_dict_is_plain_json_and_json_is_one_line():
    assert json.loads(STATE.to_json()) == STATE.to_dict()
    assert "\n" not in STATE.to_json()


def test_big_endian_numbers_come_back_as_the_same_numbers():
    state = AgentState(agent_id="a", weights=np.arange(3, dtype=">f4"))
    assert np.array_equal(AgentState.from_bytes(state.to_bytes()).weights, state.weights)


def test_states_and_messages_do_not_change():
    with pytest.raises(AttributeError):
        STATE.loss = 1.0
    with pytest.raises(ValueError, match="read-only"):
        AgentState.from_bytes(STATE.to_bytes()).gradients[0] = 1


@pytest.mark.parametrize("end", range(len(MESSAGE.to_bytes())))
def test_a_message_cut_anywhere_is_refused(end):
    with pytest.raises(ConfigError, match="SyncMessage is malformed"):
        SyncMessage.from_bytes(MESSAGE.to_bytes()[:end])


def changed(old: str, new: str) -> str:
    assert old in MESSAGE.to_json()
    return MESSAGE.to_json().replace(old, new)


HOSTILE = {
    "cut": (MESSAGE.to_json()[:-9], "malformed"),
    "too long": (MESSAGE.to_json() + "{}", "Extra data"),
    "unknown type": (changed('"message_type": "weights"', '"message_type": "pickle"'), "'pickle'"),
    "no type": (changed('"message_type": "weights", ', ""), "message_type is missing"),
    "unknown field": (changed('"source_id"', '"sourse_id"'), "sourse_id is unknown"),
    "a list": ("[]", "not a JSON object"),
    "deep": ("[" * 10**5, "recursion"),
    "object dtype": (changed('"float64", [5, 2]', '"object", [5, 2]'), "dtype 'object'"),
    "dtype is a list": (changed('["float64", [5, 2]', '[["float64"], [5, 2]'), "array"),
    "too large a shape": (changed("[5, 2]", "[5, 1000000000000000]"), "needs 40000000000000000"),
    "negative shape": (changed("[5, 2]", "[-5, -2]"), "shape"),
    "huge empty shape": (changed("[0, 3]", "[0, 10000000000000000000000]"), "malformed"),
    "65 axes": (changed("[0, 3]", str([0] * 65)), "malformed"),
    "no base64": (changed('"float64", [5, 2], "', '"float64", [5, 2], "$$$$'), "malformed"),
    "no text": (changed('"float64", [0, 3], ""', '"float64", [0, 3]'), "malformed"),
    "round below 0": (changed('"round": 3', '"round": -3'), "round is -3"),
    "one target": (changed('["b", "c"]', '"b"'), "target_ids"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_malformed_message_is_refused_in_one_line(case):
    text, words = HOSTILE[case]
    with pytest.raises(ConfigError) as refused:
        SyncMessage.from_json(text)
    line = str(refused.value)
    assert words in line
    assert "\n" not in line
    assert len(line) < 400


def test_bytes_that_are_left_are_refused():
    with pytest.raises(ConfigError, match="1 bytes too long"):
        SyncMessage.from_bytes(MESSAGE.to_bytes() + b"!")
    with pytest.raises(ConfigError, match="malformed"):
        SyncMessage.from_bytes(b"\xff" * 100)


@pytest.mark.parametrize(
    "value",
    [object(), np.array([object()]), np.array(["a"]), np.array([1j]), {1: 2}, {"$array": 1}, b"x"],
    ids=["object", "objects", "text", "complex", "key", "dollar", "bytes"],
)
def test_what_a_message_cannot_hold_is_refused(value):
    message = SyncMessage(source_id="a", message_type="state", payload={"value": value})
    for way in (message.to_json, message.to_bytes):
        with pytest.raises(ConfigError, match="a message cannot hold"):
            way()


@pytest.mark.parametrize("weights", [[1.0], {}, {"a": 1.0}, {"a": {}}, "text"], ids=repr)
def test_weights_are_a_tree_of_arrays(weights):
    document = AgentState(agent_id="a", weights=weights).to_dict()
    with pytest.raises(ConfigError, match="weights"):
        AgentState.from_dict(document)

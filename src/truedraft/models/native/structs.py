"""The structures of decoder.c, field by field in its order."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_double, c_float, c_int64, c_void_p


class Linear(Structure):
    """A linear layer with packed weights."""

    _fields_ = (
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("read", c_int64),
    )


class Layer(Structure):
    """A decoder layer."""

    _fields_ = (
        ("before_attention", c_void_p),
        ("before_mlp", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("qkv", Linear),
        ("out", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("attention_eps", c_float),
        ("mlp_eps", c_float),
        ("head_eps", c_float),
        ("scaling", c_float),
        ("pattern", c_int64),
    )


class Model(Structure):
    """A whole model."""

    _fields_ = (
        ("width", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head", c_int64),
        ("inner", c_int64),
        ("layers", c_int64),
        ("stride", c_int64),
        ("embedded", c_int64),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("eps", c_float),
        ("lm_head", Linear),
        ("layer", POINTER(Layer)),
    )


class Segment(Structure):
    """One request's share of a forward."""

    _fields_ = (
        ("start", c_int64),
        ("count", c_int64),
        ("length", c_int64),
        ("written", c_int64),
        ("capacity", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("own_start", c_void_p),
        ("own", c_void_p),
    )


class Batch(Structure):
    """A packed forward."""

    _fields_ = (
        ("total", c_int64),
        ("segments", c_int64),
        ("wanted", c_int64),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("rows", c_void_p),
        ("rotary", c_void_p),
        ("first", c_void_p),
        ("segment", POINTER(Segment)),
    )


class Scratch(Structure):
    """Memory for numbers on the way."""

    _fields_ = (
        ("stream", c_void_p),
        ("projected", c_void_p),
        ("mixed", c_void_p),
        ("active", c_void_p),
        ("fetched", c_void_p),
        ("inputs", c_void_p),
        ("scores", c_void_p),
        ("slots", c_void_p),
        ("rows", c_int64),
        ("keys", c_int64),
    )


class Heads(Structure):
    """Residual heads that end in the LM head."""

    _fields_ = (
        ("lm_head", POINTER(Linear)),
        ("block", POINTER(Linear)),
        ("layers", c_int64),
        ("heads", c_int64),
        ("used", c_int64),
        ("wide", c_int64),
    )


class Asked(Structure):
    """What is asked of heads."""

    _fields_ = (
        ("rows", c_int64),
        ("vocab", c_int64),
        ("ranks", c_int64),
        ("factor", c_double),
        ("hidden", c_void_p),
        ("logits", c_void_p),
        ("values", c_void_p),
        ("ids", c_void_p),
    )

"""Other engines, asked from outside: the same proof for whatever answers token ids or text."""

from truedraft.certify.engines.against import compare_engines
from truedraft.certify.engines.asked import TOKENS
from truedraft.certify.engines.evidence import ALARM, CERTAIN
from truedraft.certify.engines.report import EngineReport, engine_meaning, engine_page, engine_verdict, junit, xml_text
from truedraft.certify.engines.run import certify_engine

__all__ = [
    "ALARM",
    "CERTAIN",
    "TOKENS",
    "EngineReport",
    "certify_engine",
    "compare_engines",
    "engine_meaning",
    "engine_page",
    "engine_verdict",
    "junit",
    "xml_text",
]

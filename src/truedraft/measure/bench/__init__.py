"""Benchmarks one can believe: systems under test, paired runs, tables, plots, one JSON line last."""

from truedraft.measure.bench.answers import (
    AnsweredPrompt,
    Difference,
    VocabularyCost,
    answered_prompts,
    find_difference,
    vocabulary_costs,
)
from truedraft.measure.bench.breakdown import CurveCosts
from truedraft.measure.bench.costs import PARTS, MachineCosts, measure_costs
from truedraft.measure.bench.prompts import is_question_file, read_questions, spread
from truedraft.measure.bench.record import Circumstances, bench_record
from truedraft.measure.bench.report import OutputFolder
from truedraft.measure.bench.runs import (
    Failure,
    Group,
    Results,
    Row,
    System,
    SystemOutput,
    grouped,
    run_all,
    time_without_core,
)
from truedraft.measure.bench.suite import ENTROPY, PLAIN, OurEngine, Suite, check_peers, load_suite
from truedraft.measure.bench.summary import (
    Ratio,
    Summary,
    differing_answers,
    empty_answers,
    shown,
    summarise,
    unsettled_steps,
)
from truedraft.measure.bench.tables import all_tables, decisions_table
from truedraft.measure.bench.trees import drafted_trees

__all__ = [
    "ENTROPY",
    "PARTS",
    "PLAIN",
    "AnsweredPrompt",
    "Circumstances",
    "CurveCosts",
    "Difference",
    "Failure",
    "Group",
    "MachineCosts",
    "OurEngine",
    "OutputFolder",
    "Ratio",
    "Results",
    "Row",
    "Suite",
    "Summary",
    "System",
    "SystemOutput",
    "VocabularyCost",
    "all_tables",
    "answered_prompts",
    "bench_record",
    "check_peers",
    "decisions_table",
    "differing_answers",
    "drafted_trees",
    "empty_answers",
    "find_difference",
    "grouped",
    "is_question_file",
    "load_suite",
    "measure_costs",
    "read_questions",
    "run_all",
    "shown",
    "spread",
    "summarise",
    "time_without_core",
    "unsettled_steps",
    "vocabulary_costs",
]

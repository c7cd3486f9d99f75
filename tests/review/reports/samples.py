"""Write out by hand a report with something in every section."""

from vantage.review.reports.curves import stage_curves
from vantage.review.reports.gathered import (
    Answer,
    Comparison,
    Cost,
    Decision,
    Distribution,
    Gate,
    Measured,
    ModelFact,
    Publication,
    Remark,
    Report,
    Sample,
    StageCurves,
    Step,
    Token,
)
from vantage.schemas.records.alarms import Alarm
from vantage.schemas.records.conclusions import Conclusion, Judged
from vantage.schemas.records.effects import Effect
from vantage.schemas.records.energy import Energy
from vantage.schemas.records.verdicts import Verdict

METRICS = ("score_mean", "loss", "entropy", "kl_to_reference", "explained_variance")


def verdict(*, passed: bool = True, confidence: float | None = None) -> Verdict:
    return Verdict(
        passed=passed,
        metric="accuracy_gain",
        measured=0.25,
        relation=">=",
        threshold=0.02 if passed else 0.5,
        on_fail="stop",
        evidence={"accuracy_gain": 0.25},
        n=256,
        interval=(0.2, 0.3),
        confidence=confidence,
    )


DECISION = Decision(
    conclusion=Conclusion("bad", "gate closed; learned nothing; better: accuracy +0.300 (0.25 to 0.35)"),
    judged=(
        Judged(
            "last",
            "policy",
            "sft",
            (Effect("accuracy_gain", "accuracy", 0.3, 0.0, (0.25, 0.35), (0.9, 0.6), 256),),
        ),
    ),
    alarms=(Alarm("policy", "Learned nothing", "the best weights are those of sft"),),
    models=(ModelFact("policy", "hand", "3", "ab" * 32),),
    task=(
        "last compares policy with sft on the test prompts of prompts; the verifier sums judges the responses.",
    ),
    author="ada",
    began="2026-01-01 00:00 UTC",
    ended="2026-01-01 01:30 UTC",
    approvals=(("value", "approved by grace on 2026-01-01 00:30 UTC: the critic is good enough"),),
    waiting=("publish:hand@champion",),
)


def curves(step: str, points: int = 60) -> StageCurves:
    told = {name: [(at, 1000 * at, ((at * 7) % 11) / 11) for at in range(1, points)] for name in METRICS}
    found = stage_curves(step, "policy_optimization", told, most=12)
    assert found is not None
    return found


def report(stages: int = 6) -> Report:
    names = ["model", *(f"a_stage_with_a_rather_long_name_{place}" for place in range(stages))]
    answer = Answer(
        "x" * 3000, (("judgement", 1.0),), True, (Token("a b", -0.001, 0.5), Token("\n", -3.5, -1.5)), 7
    )
    step = names[1]
    return Report(
        run_id="0001-hand-aaaaaa",
        recipe="hand",
        source="hand.yaml",
        overrides=("seed=1",),
        status="gate_closed",
        started="2026-01-01 00:00:00",
        openings=2,
        steps=tuple(
            Step(
                name,
                "sft",
                "completed",
                "ab" * 32,
                75.5,
                tuple(("init", each) for each in names[:place]),
                "x 1",
            )
            for place, name in enumerate(names)
        ),
        decision=DECISION,
        next_steps=("Change something:", "    vantage run hand.yaml --set " + "a.long.override=1 " * 20),
        publications=(Publication(step, "hand@champion", "is published", True),),
        gates=(
            Gate(step, verdict(confidence=0.95), "accuracy_gain >= 0.02", "stop", "A gain."),
            Gate(step, verdict(passed=False), "accuracy_gain >= 0.5", "stop", "A gain."),
            Gate(names[-1], None, "accuracy_gain >= 0.5", "stop", "A gain."),
        ),
        curves=tuple(curves(name) for name in names[1:]),
        comparisons=(
            Comparison(
                step=names[-1],
                candidate="policy",
                baseline="sft",
                summary="accuracy 0.9 against 0.6",
                responses=9,
                distributions=(
                    Distribution("Accuracy", (0.0, 1.0), True, (4, 5), (1, 8), 5 / 9, 8 / 9),
                    Distribution("Length", (0.0, 10.0, 20.0), False, (4, 5), (1, 8), 9.0, 15.0),
                ),
                samples=(Sample("prompt", answer, answer), Sample("another", answer, Answer("y", (), False))),
                critic="value",
            ),
        ),
        measured=(Measured(step, "accuracy", 0.5, (0.4, 0.6), 256, "1", "A share of something. " * 9),),
        costs=(
            Cost(step, 2, 100.0, 150.0, 8, "H200", 1.5e9, 0.25, Energy(gpu_joules=7200.0), 1),
            Cost("model", 1, 3.0, 3.0, 0, "cpu", None, None, Energy(cpu_joules=90.0), 1),
        ),
        environment=(
            ("torch", (("2.13.0", tuple(names)),)),
            ("device", (("cpu", ("model",)), ("NVIDIA H200", tuple(names[1:])))),
        ),
        code=((step, "cd" * 32),),
        origin=(("started by", "ada"),),
        remarks=(Remark(step, "5 % of the rows were dropped", "warning"),),
        missing=("one thing is missing",),
    )

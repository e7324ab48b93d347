"""Train the agent over its inbox, by a reward or by a judge: `python -m langgraph_email_agent.train`, in `examples`."""

import argparse
from pathlib import Path

from langgraph_email_agent.apps import make_app
from langgraph_email_agent.inbox import make_mail
from langgraph_email_agent.judge import reply
from langgraph_email_agent.questions import HELD_OUT_QUESTIONS, TRAIN_QUESTIONS, make_questions
from measured_training import falling, measure, model_of, parser

import offbook
from offbook.testing import scripted_llm
from offbook.trainer.report import TrainReport

HERE = Path(__file__).parent


def main(options: argparse.Namespace, judge: offbook.Ruler | None = None) -> None:
    """Evaluates by the reward, trains by it or by the judge, evaluates, and asks the trained agent."""
    brief, by_judge = options.base_model == "tiny", "" if judge is None else "ruler-"
    model, mails = model_of(f"email-agent-{by_judge}".rstrip("-"), options), make_mail(brief=brief)
    agent, trained = make_app(model, brief=brief), make_app(model, brief=brief, judge=judge)
    questions = make_questions(mails, TRAIN_QUESTIONS, options.seed, brief=brief)
    held_out = make_questions(mails, HELD_OUT_QUESTIONS, held_out=True, brief=brief)[: options.held_out]

    def train(steps: int) -> TrainReport:
        return trained.train(
            questions,
            steps=steps,
            group_size=8,
            scenarios_per_step=8,
            concurrency=64,
            config=falling(options, options.kl, minibatches=4),
            seed=options.seed,
        )

    results = HERE / f"results/{by_judge}seed-{options.seed}.json"
    measure(lambda: agent.evaluate(held_out), train, options, results, rollouts_per_step=64)
    asked = held_out[0]
    state = agent.trained(temperature=0.0).invoke({"messages": [("user", asked.question)]})
    print(f"{asked.question} -> {state['messages'][-1].text!r}; right is {asked.answer!r}")


if __name__ == "__main__":
    arguments = parser(__doc__, steps=30)
    arguments.add_argument("--kl", type=float, default=0.2, help="weight of the KL to the base; for a real model 0")
    arguments.add_argument("--judge", help="train by RULER with this LLM, such as openai/o3, or scripted: judge.py")
    given = arguments.parse_args()
    if given.judge == "scripted":
        with scripted_llm(reply) as endpoint:
            main(given, offbook.Ruler("openai/judge", api_base=endpoint.url, api_key="unused", cache=None))
    else:
        main(given, offbook.Ruler(given.judge) if given.judge else None)

"""Trains the agent of agent.py, which knows nothing of it: on a GPU, or with `--tiny` on any machine."""

import argparse
import os
from dataclasses import dataclass

from agent import make_agent
from inbox import Inbox, make_mail
from judge import reply
from questions import HELD_OUT_QUESTIONS, TRAIN_QUESTIONS, make_questions, reward

import offbook
from offbook.testing import scripted_llm
from offbook.trainer.evaluate import Evaluation
from offbook_langgraph import trainable
from offbook_langgraph.training.trainable import TrainableRunnable

os.environ.setdefault("OPENAI_API_KEY", "unused")  # ChatOpenAI wants one, though the policy answers in its place


@dataclass(frozen=True)
class Form:
    """What differs between the two forms of the example."""

    base_model: str
    brief: bool  # the inbox, and the questions about it
    max_tokens: int  # of one turn
    steps: int
    learning_rate: float  # both fall to zero over the run
    kl_coef: float


FULL = Form("Qwen/Qwen2.5-7B-Instruct", brief=False, max_tokens=400, steps=50, learning_rate=2e-5, kl_coef=0.0)
TINY = Form("tiny", brief=True, max_tokens=64, steps=30, learning_rate=3e-3, kl_coef=0.2)


def make_trainable(form: Form, model: offbook.TrainableModel) -> TrainableRunnable:
    """The agent over an inbox; `model` answers in place of its own while it is trained."""
    agent = make_agent(Inbox(make_mail(brief=form.brief)), form.max_tokens)
    return trainable(agent, model=model, reward=reward)


# what the command line trains: offbook train train:email_agent
email_agent = make_trainable(
    FULL, offbook.TrainableModel("email-agent", project="examples", base_model=FULL.base_model)
)
tiny_email_agent = make_trainable(
    TINY, offbook.TrainableModel("email-agent-tiny", project="examples", base_model="tiny")
)


def main(options: argparse.Namespace, judge: offbook.Ruler | None = None) -> None:
    """Evaluates by the reward, trains by it or by the judge, evaluates, and asks the trained agent."""
    form = TINY if options.tiny else FULL
    steps = options.steps or form.steps
    model = offbook.TrainableModel(
        name=f"email-agent-{'tiny-' if options.tiny else ''}{'ruler-' if judge else ''}{options.seed}",
        project="examples",
        base_model=options.base_model or form.base_model,
        backend=offbook.RemoteBackend(options.url) if options.url else None,
    )
    agent, mails = make_trainable(form, model), make_mail(brief=form.brief)
    judged = agent if judge is None else trainable(make_agent(Inbox(mails), form.max_tokens), model=model, judge=judge)
    questions = make_questions(mails, TRAIN_QUESTIONS, options.seed, brief=form.brief)
    held_out = make_questions(mails, HELD_OUT_QUESTIONS, held_out=True, brief=form.brief)

    def config(step: int) -> offbook.TrainConfig:
        left = 1 - (step - 1) / steps
        return offbook.TrainConfig(learning_rate=form.learning_rate * left, kl_coef=form.kl_coef * left, minibatches=4)

    print(line("before", agent.evaluate(held_out)))
    report = judged.train(
        questions, steps=steps, group_size=8, scenarios_per_step=8, concurrency=64, config=config, seed=options.seed
    )
    print(line("after", agent.evaluate(held_out)))
    print(f"LoRA: {report.checkpoint}")

    asked = held_out[0]
    state = agent.trained(temperature=0.0).invoke({"messages": [("user", asked.question)]})
    print(f"{asked.question} -> {state['messages'][-1].text!r}; right is {asked.answer!r}")


def line(when: str, found: Evaluation) -> str:
    """`before: step 0, 60 held-out questions: found 100%, ...`"""
    shares = ", ".join(f"{name} {found.metrics[name]:.0%}" for name in ("found", "read", "success"))
    turns = found.metrics["turns"]
    return f"{when}: step {found.step}, {found.scenarios} held-out questions: {shares}, {turns:.1f} turns"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="the bundled policy, short questions about a brief inbox")
    parser.add_argument("--steps", type=int, help=f"steps in all; none: {FULL.steps}, or {TINY.steps} with --tiny")
    parser.add_argument("--seed", type=int, default=0, help="of the training questions and their order")
    parser.add_argument("--url", help="a server elsewhere; none: OFFBOOK_URL, or a server on this machine")
    parser.add_argument("--base-model", help=f"none: {FULL.base_model}, or tiny with --tiny")
    parser.add_argument("--judge", help="train by RULER with this LLM, such as openai/o3, or scripted: judge.py")
    given = parser.parse_args()
    if given.judge == "scripted":
        with scripted_llm(reply) as endpoint:
            main(given, offbook.Ruler("openai/judge", api_base=endpoint.url, api_key="unused", cache=None))
    else:
        main(given, offbook.Ruler(given.judge) if given.judge else None)

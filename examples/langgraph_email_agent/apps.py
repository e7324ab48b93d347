"""The agent with Offbook around it, and what the command line trains: `offbook train langgraph_email_agent.apps:email_agent`."""

import os

from langgraph_email_agent.agent import make_agent
from langgraph_email_agent.inbox import Inbox, make_mail
from langgraph_email_agent.questions import reward

import offbook
from offbook_langgraph import trainable
from offbook_langgraph.training.trainable import TrainableRunnable

os.environ.setdefault("OPENAI_API_KEY", "unused")  # ChatOpenAI wants one, though the policy answers in its place


def make_app(model: offbook.TrainableModel, *, brief: bool, judge: offbook.Ruler | None = None) -> TrainableRunnable:
    """The agent over an inbox; `model` answers in place of its own. It is scored by the reward, or by the judge."""
    agent = make_agent(Inbox(make_mail(brief=brief)), max_tokens=64 if brief else 400)
    return trainable(agent, model=model, reward=reward) if judge is None else trainable(agent, model=model, judge=judge)


email_agent = make_app(
    offbook.TrainableModel("email-agent", project="examples", base_model="Qwen/Qwen2.5-7B-Instruct"), brief=False
)
tiny_email_agent = make_app(
    offbook.TrainableModel("email-agent-tiny", project="examples", base_model="tiny"), brief=True
)

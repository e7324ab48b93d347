"""What a step was measured by: its token file, which pages read (`engine/token_file.py` has the format), and its
metrics, all floats. A mean over nothing is left out. The table lists them; docs/reading_steps.md explains how to read them.

| name | meaning |
|---|---|
| reward/mean, std, min, max | of the scored rollouts; std is the population's over the whole step |
| reward/group_std | mean over groups of the standard deviation inside a group |
| groups/total | groups of the request; each is in exactly one of the next six rows |
| groups/trained | at least one token of the group is trained |
| groups/no_spread | all scored rollouts have the same reward, up to rounding; 0 where good rollouts are imitated, which compares none |
| groups/all_good, none_good | where good rollouts are imitated: all rollouts of the group have min_reward; none has it |
| groups/dropped_too_few | fewer scored rollouts than min_group_size; where rollouts are imitated: none |
| groups/truncated | mask_truncated_completions leaves out all rollouts that have an advantage |
| groups/without_targets | rollouts have an advantage, and none of them a token to train |
| groups/no_spread_reward | mean reward of the groups in groups/no_spread |
| answers/commonest | share of the request's rollouts that gave its commonest answer: the text of all their calls, without thoughts and white space; only with rollouts of several groups |
| answers/commonest_reward | mean reward of these rollouts |
| trajectories/total, trained, failed, unscored | unscored does not count the failed |
| trajectories/truncated | of the total, with mask_truncated_completions: left out because a trained call ended at a limit of tokens |
| trajectories/without_targets | had an advantage and nothing to train |
| trajectories/replayed | of earlier steps, imitated again; in no other metric of groups, trajectories and rewards |
| calls/total | calls of the request with sampled tokens, recorded or rendered; one for each choice of a call |
| calls/trained, greedy, not_trained | of trajectories with an advantage: trained; left out because of T = 0; because cancelled, failed, late, with an image or without a sampled token |
| calls/excluded, weighted | of trajectories with an advantage: left out by weight 0 (train_on=, or thrown away by the app and so not imitated); trained with a weight other than 1 |
| calls/unused | of trajectories with an advantage: the app threw the output away (a retry, a node that ran again); marked, and trained like any other unless good rollouts are imitated |
| calls/tool_call_rate, parse_failure_rate | share of all calls with a parsed tool call; that looked like one and were none |
| calls/untagged | share of the calls with a parsed tool call that were written without the marks of the template; read as calls all the same |
| calls/constrained_share, rendered_share | share of trained calls without usable recorded logprobs; rendered from messages |
| calls/cut_off_rate | share of all calls whose answer ended at a limit of tokens |
| calls/skipped | of supervised training with skip_bad: messages that the template refuses, or that are too long |
| tokens/unmeasured | targets of calls under a constraint that the learner does not know, such as a JSON grammar: they are in no KL, ratio, clip or entropy |
| calls/stale_share | share of trained calls sampled at an earlier step |
| calls/staleness_mean, staleness_max | how many steps old the trained calls are; neither they nor stale_share in supervised training |
| tokens/trained, outside_kept | targets that entered the loss; targets that did not, because the top-k, top-p or min-p of the learner before the step excludes their token |
| tokens/computed, plain_rows | tokens of one pass over the rows; what one row per call would compute |
| flops/share | estimated operations of the layout taken, divided by one row per call |
| kl/sampler_learner | KL(sampler, learner at the start of the step) per token, k3; unconstrained recorded calls only |
| kl/sampler_learner_max_diff | largest absolute logprob difference between them |
| kl/base | k3 to the base per measured token, when kl_coef > 0 |
| kl/teacher | with distill: mean of old minus teacher logprob over the sampled tokens that the teacher scored, nats: the reverse KL to it |
| tokens/untaught | with distill: targets without a teacher's logprob, because its own top-k, top-p or min-p, or a constraint, excludes them; for a teacher on vLLM also those sampled at another temperature than 1 or under a filter |
| importance/mean, capped_share | the truncated importance weight; share of weights at the cap |
| loss/value | mean over the step's updates |
| loss/cross_entropy, loss/perplexity | of supervised training: mean -logprob of the trained tokens before their first update, nats, without weights; its exponential |
| loss/updates, loss/updates_total, loss/learning_rate | updates of this step; since the model was created; rate of the last update |
| loss/scale, overflows | with a float16 base: the loss scale after the step; updates computed again because gradients overflowed |
| grad_norm, grad_norm_max | before clipping: mean and largest over the updates |
| clip_fraction | share of targets whose gradient the clip of the ratio reduced or stopped; over all epochs |
| entropy | mean over targets at the start of the step, nats, under the call's sampling settings |
| layout/{tree, leaf_rows, call_rows} | share of minibatches computed so |
| layout/tree_refused | 1 when the model must not be trained on trees |
| layout/probe_difference | largest logprob difference between tree and plain rows at start-up, nats; absent when nothing could be computed on a tree |
| memory/learner_peak, learner_held, gpu_peak | on CUDA, GiB at the peak of the step: the learner's tensors; what torch held for them; all processes on the GPU |
| seconds/{plan, old_logprobs, base_logprobs, update, evaluate, save, total} | wall time per phase; save ends before the last rename |
"""

from __future__ import annotations

import errno
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from .. import token_file
from ..protocol import JobTrajectory, TrainCommand, TrainJob
from ..token_file import CLIPPED, FORMAT, TRAINED, TokenFile, TokenHead, TrainedCall
from ..token_tree import Segments, TokenTree, build_tree
from .model.policy import Policy
from .selection import Selection, is_truncated
from .targets.advantage import GroupClass
from .targets.batch import Groups, TrainBatch
from .update.loss import importance_weights, k3
from .update.row_pass import Scores, TeacherScores
from .update.step import StepTotals

_END_OF_THOUGHT = "</think>"
GIB = 2**30


@dataclass(frozen=True)
class Mismatch:
    """The difference between the sampler's and the learner's logprobs on recorded calls without unknown constraints."""

    kl: float  # nats per token, k3
    max_difference: float  # nats
    tokens: int

    def warning(self, kl_warn: float, stale_share: float, policy: Policy) -> str:
        """The warning about a step whose KL is above `kl_warn`. `stale_share`: of its calls, those from earlier steps."""
        dtype = str(policy.dtype).removeprefix("torch.")
        cure = f"give both the same dtype (the learner has {dtype})"
        if policy.four_bit:
            cure = (
                "the learner holds the base in 4 bits (load_in_4bit) and the sampler does not; without load_in_4bit both "
                f"have the same base, in dtype {dtype}"
            )
        return (
            f"sampler and learner disagree: KL {self.kl:.3g} nats per token over {self.tokens} tokens, above "
            f"kl_warn={kl_warn:g} (largest logprob difference {self.max_difference:.3g}; "
            f"{stale_share:.0%} of the calls are from earlier steps): {cure}"
        )


def selection_metrics(selection: Selection, step: int, policy: Policy) -> dict[str, float]:
    """Metrics of what a job trains, and of the mask probe at start-up. `step`: the model's before the update."""
    replayed = [trajectory.id for group in selection.groups for trajectory in group if trajectory.replayed]
    classes = selection.classes
    groups = selection.groups[: len(classes)]
    metrics = reward_metrics(groups, classes)
    config = selection.config
    if not config.supervised or config.imitates_the_good:  # other supervised jobs hold no answers of the policy
        metrics |= answer_metrics(groups, policy) | untagged_metrics(groups, policy)
    if config.mask_truncated_completions:
        metrics["trajectories/truncated"] = float(sum(is_truncated(t) for group in groups for t in group))
    if policy.tree_difference is not None:
        metrics["layout/probe_difference"] = policy.tree_difference
    if selection.batch is not None:
        metrics |= batch_metrics(selection.batch, None if config.supervised else step)
    if replayed:
        trained = set(selection.batch.trajectories if selection.batch is not None else ())
        metrics |= {
            "trajectories/replayed": float(len(replayed)),
            "trajectories/trained": float(len(trained.difference(replayed))),
        }
    if selection.skipped:
        metrics["calls/skipped"] = float(len(selection.skipped))
    return metrics


def reward_metrics(groups: Groups, classes: Sequence[GroupClass]) -> dict[str, float]:
    """Metrics of rewards, groups and calls, which need no forward pass."""
    trajectories = [trajectory for group in groups for trajectory in group]
    group_rewards = [[t.reward for t in group if t.reward is not None and not t.failed] for group in groups]
    rewards = [reward for group in group_rewards for reward in group]
    pairs = zip(group_rewards, classes, strict=True)
    equal = [statistics.fmean(group) for group, named in pairs if named is GroupClass.NO_SPREAD]
    calls = [sample for trajectory in trajectories for sample in trajectory.samples]
    metrics: dict[str, float | None] = {
        "groups/total": len(groups),
        **{f"groups/{named}": classes.count(named) for named in GroupClass},
        "groups/no_spread_reward": _mean(equal),
        "trajectories/total": len(trajectories),
        "trajectories/failed": sum(t.failed for t in trajectories),
        "trajectories/unscored": sum(t.reward is None and not t.failed for t in trajectories),
        "calls/total": len(calls),
        "calls/tool_call_rate": _mean([sample.tool_call for sample in calls]),
        "calls/parse_failure_rate": _mean([sample.parse_failure for sample in calls]),
        "calls/cut_off_rate": _mean([sample.cut_off for sample in calls]),
    }
    if rewards:
        metrics |= {
            "reward/mean": _mean(rewards),
            "reward/std": statistics.pstdev(rewards),
            "reward/min": min(rewards),
            "reward/max": max(rewards),
            "reward/group_std": _mean([statistics.pstdev(group) for group in group_rewards if len(group) > 1]),
        }
    return _measured(metrics)


def answer_metrics(groups: Groups, policy: Policy) -> dict[str, float]:
    """How many rollouts of different groups, and so of different prompts, gave the same answer. Whole answers are compared, so
    neither their length nor white space counts, and one prompt's answers alone are not a sign of anything."""
    answers: list[tuple[tuple[str, ...], float | None]] = []
    prompts = 0
    for group in groups:
        called = [trajectory for trajectory in group if trajectory.samples]
        prompts += bool(called)
        answers += [(_answer(t, policy), None if t.failed else t.reward) for t in called]
    if prompts < 2:
        return {}
    commonest, times = Counter(answer for answer, _ in answers).most_common(1)[0]
    rewards = [reward for answer, reward in answers if answer == commonest and reward is not None]
    return _measured({"answers/commonest": times / len(answers), "answers/commonest_reward": _mean(rewards)})


def untagged_metrics(groups: Groups, policy: Policy) -> dict[str, float]:
    """The share of tool calls without marks, where the base's template writes marks."""
    samples = [sample for group in groups for trajectory in group for sample in trajectory.samples if sample.tool_call]
    marks = policy.chat_template.call_marks if samples else ()
    if not marks:
        return {}
    texts = [policy.decode(cast(list[int], sample.completion_ids.tolist())) for sample in samples]
    return _measured({"calls/untagged": _mean([not any(mark in text for mark in marks) for text in texts])})


def _answer(trajectory: JobTrajectory, policy: Policy) -> tuple[str, ...]:
    """The texts that a rollout sampled, without thoughts, white space and the token that ended them, of which a base may have
    several."""
    texts: list[str] = []
    for sample in trajectory.samples:
        ids: list[int] = sample.completion_ids.tolist()
        text = policy.decode(ids[:-1] if ids and ids[-1] in policy.end_ids else ids)
        texts.append("".join(text.rpartition(_END_OF_THOUGHT)[2].split()))
    return tuple(texts)


def batch_metrics(batch: TrainBatch, step: int | None) -> dict[str, float]:
    """Metrics of the batch: which trajectories and calls are trained. `step`: the model's before the update; None in
    supervised training, whose calls may be of another model."""
    samples = batch.samples
    ages = [] if step is None else [float(step - sample.step) for sample in samples]
    metrics = {
        "trajectories/trained": float(len(batch.trajectories)),
        "trajectories/without_targets": float(len(batch.without_targets)),
        "calls/trained": float(len(samples)),
        **{f"calls/{reason}": float(batch.left_out[reason]) for reason in ("excluded", "greedy", "not_trained")},
        "calls/weighted": float(sum(sample.weight != 1 for sample in samples)),
        "calls/unused": float(batch.unused),
        "calls/constrained_share": _mean([sample.constrained is not None for sample in samples]),
        "calls/rendered_share": batch.rendered_share if samples else None,
        "calls/stale_share": _mean([age > 0 for age in ages]),
        "calls/staleness_mean": _mean(ages),
        "calls/staleness_max": max(ages, default=None),
        "tokens/unmeasured": float(batch.constrained.sum()),
    }
    return _measured(metrics)


def step_metrics(
    batch: TrainBatch, totals: StepTotals, mismatch: Mismatch | None, importance_cap: float | None, updates_total: int
) -> dict[str, float]:
    """Metrics of the forward passes and updates. `updates_total`: the model's optimizer updates, with this step's."""
    kept, plans = totals.old.kept, totals.plans
    measured = kept & ~torch.from_numpy(batch.constrained)  # pyright: ignore[reportUnknownMemberType]  # torch's own annotations are partial
    layouts = Counter(plan.layout for plan in plans)
    flops = [plan.flops[plan.layout] for plan in plans]
    plain = [plan.flops["call_rows"] for plan in plans]
    metrics: dict[str, float | None] = {
        "tokens/trained": float(kept.sum()),
        "tokens/outside_kept": float((~kept).sum()),
        "tokens/computed": float(sum(plan.tokens for plan in plans)),
        "tokens/plain_rows": float(sum(plan.plain_tokens for plan in plans)),
        "flops/share": sum(flops) / max(sum(plain), 1.0),
        "kl/sampler_learner": mismatch.kl if mismatch is not None else None,
        "kl/sampler_learner_max_diff": mismatch.max_difference if mismatch is not None else None,
        "loss/value": _mean(totals.losses),
        "loss/updates": float(totals.updates),
        "loss/updates_total": float(updates_total),
        "loss/learning_rate": totals.learning_rate,
        "grad_norm": _mean(totals.grad_norms or [0.0]),  # without an update it was exactly 0
        "grad_norm_max": max(totals.grad_norms, default=0.0),
        "clip_fraction": totals.clipped / totals.ratios if totals.ratios else None,
        "entropy": _mean_of(totals.old.entropy[measured]),
        "layout/tree_refused": float(any(plan.refused is not None for plan in plans)),
    }
    if totals.kl_counted:
        metrics["kl/base"] = totals.kl_sum / totals.kl_counted
    for name in ("tree", "leaf_rows", "call_rows"):
        metrics[f"layout/{name}"] = layouts[name] / len(plans) if plans else None
    metrics |= _importance(batch, totals, importance_cap)
    return _measured(metrics) | {f"seconds/{phase}": seconds for phase, seconds in totals.seconds.items()}


def teacher_metrics(totals: StepTotals, teacher: TeacherScores) -> dict[str, float]:
    """The distance to the teacher at the start of the step, over the targets that both score."""
    measured = totals.old.kept & ~torch.isnan(teacher.logprobs)
    metrics = {
        "kl/teacher": _mean_of((totals.old.logprobs - teacher.logprobs)[measured]),
        "tokens/untaught": float((totals.old.kept & ~measured).sum()),
    }
    return _measured(metrics)


def cross_entropy_metrics(scores: Scores) -> dict[str, float]:
    """Mean cross-entropy of the targets of supervised training, before their first update, and its perplexity."""
    loss = -float(scores.logprobs[scores.kept].mean())
    return {"loss/cross_entropy": loss, "loss/perplexity": math.exp(min(loss, 700.0))}


def sampler_mismatch(batch: TrainBatch, totals: StepTotals) -> Mismatch | None:
    """Compare recorded logprobs with the learner's at the start of the step; None if there is none to compare."""
    sampler, old = _recorded(batch, totals)
    if not len(old):
        return None
    # Tokens come from the sampler, so k3 takes it as the current policy and the learner as the reference.
    return Mismatch(float(k3(old, sampler).mean()), float((old - sampler).abs().max()), len(old))


def _importance(batch: TrainBatch, totals: StepTotals, cap: float | None) -> dict[str, float | None]:
    sampler, old = _recorded(batch, totals)
    if cap is None or not len(old):
        return {}
    weights = importance_weights(old, sampler, cap)
    return {"importance/mean": _mean_of(weights), "importance/capped_share": _mean_of((weights >= cap).double())}


def _recorded(batch: TrainBatch, totals: StepTotals) -> tuple[Tensor, Tensor]:
    """The sampler's and the old policy's logprobs of kept targets with a recorded logprob."""
    sampler = torch.from_numpy(batch.sampler)  # pyright: ignore[reportUnknownMemberType]  # torch's own annotations are partial
    both = ~torch.isnan(sampler) & totals.old.kept
    return sampler[both], totals.old.logprobs[both]


def _measured(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The metrics without those that are means over an empty set."""
    return {name: float(value) for name, value in metrics.items() if value is not None}


def _mean(values: Sequence[float] | Sequence[bool]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _mean_of(values: Tensor) -> float | None:
    return float(values.double().mean()) if len(values) else None


def reset_memory_peaks(device: torch.device) -> None:
    """Count the memory peaks of a CUDA device from now on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_metrics(device: torch.device) -> dict[str, float]:
    """What a step took of a CUDA device, GiB, as torch and the driver count it; nothing of others, where torch counts no peaks.
    The device's peak is what all processes hold now, and what torch held more at this process's own peak."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.max_memory_reserved(device)
    return {
        "memory/learner_peak": torch.cuda.max_memory_allocated(device) / GIB,
        "memory/learner_held": held / GIB,
        "memory/gpu_peak": (total - free + held - torch.cuda.memory_reserved(device)) / GIB,
    }


def make_token_file(command: TrainCommand, job: TrainJob, batch: TrainBatch, totals: StepTotals) -> TokenFile:
    """The token file of a computed step. `head.applied` is False if the step had no update."""
    tree = build_tree(batch.samples)
    runs = tree.segments()
    head = TokenHead(
        format=FORMAT,
        model=command.model,
        step=command.step + 1,
        applied=totals.updates > 0,
        request_id=command.request_id,
        loss=job.config.loss,
        updates=totals.updates,
        created_at=time.time(),
        calls=_calls(batch, tree, runs),
    )
    old, last = totals.old, totals.last
    return TokenFile(
        head,
        token_ids=batch.settings.token_ids.astype(np.int32),
        recorded=np.concatenate([sample.logprobs for sample in batch.samples]).astype(np.float32),
        logprobs=old.logprobs.numpy().astype(np.float32),
        entropy=old.entropy.numpy().astype(np.float16),
        coefficients=last.coefficients.numpy().astype(np.float32),
        flags=(TRAINED * old.kept.numpy() + CLIPPED * last.clipped.numpy()).astype(np.uint8),
        segment_length=(runs.end - runs.start).astype(np.int32),
        segment_parent=runs.parent.astype(np.int32),
        last_logprobs=last.logprobs.numpy().astype(np.float32) if totals.updates > 1 else None,
    )


def _calls(batch: TrainBatch, tree: TokenTree, runs: Segments) -> tuple[TrainedCall, ...]:
    last = [tree.target_node[sample.offset + len(sample.completion_ids) - 1] for sample in batch.samples]
    leaves = np.searchsorted(runs.start, last, "right") - 1
    return tuple(
        TrainedCall(
            trajectory=batch.trajectories[int(batch.trajectory[sample.offset])],
            call_id=sample.call_id,
            index=sample.index,
            step=sample.step,
            prompt=len(sample.prompt_ids),
            offset=sample.offset,
            tokens=len(sample.completion_ids),
            advantage=float(batch.advantages[sample.offset]),
            weight=sample.weight,
            constrained=sample.constrained,
            leaf=int(leaf),
        )
        for sample, leaf in zip(batch.samples, leaves, strict=True)
    )


def store_token_file(command: TrainCommand, tokens: TokenFile, warn: Callable[[str], None]) -> None:
    """Write the token file and delete old ones. An OSError is only a warning, because the step is valid without it."""
    folder = token_file.folder_of(command.checkpoints)
    try:
        token_file.write(folder, tokens)
        token_file.sweep(folder, command.keep_tokens)
    except OSError as error:
        what = "no space is left" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
        warn(
            f"the token file of step {tokens.head.step} was not kept in {folder}: {what}. Training goes on; the pages show "
            "this step's rollouts without the learner's numbers. Free space, or set keep_tokens=0"
        )

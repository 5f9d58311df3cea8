"""The optimizer steps of one training step.

Invariant: the same parameters, optimizer state, rows, step and learning rate give the same new parameters, bit for bit on a CPU
with the same thread count; `writing` is true from before the first parameter write until all are done.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config.training import Algorithm, Trainer
from pipeline.errors import StageFailed
from pipeline.trainer import losses
from pipeline.trainer.chunks import Chunk, Normaliser, build_chunk
from pipeline.trainer.measures import Tally, known, mean
from pipeline.trainer.packing import Row, split_chunks, split_minibatches
from pipeline.trainer.schedules import learning_rate

FIGURES = (
    "loss", "loss_opd", "loss_grpo", "loss_imitation", "loss_anchor", "samples", "tokens", "optimizer_steps", "nonfinite_steps",
    "grad_norm", "entropy", "kl_behaviour", "ratio_mean", "ratio_max", "ratio_masked_share", "clipped_share", "teacher_kl", "lr",
    "teacher_coverage",
)  # fmt: skip
"""What `Updater.update` returns. `teacher_kl` is the mean of log p_student - log p_teacher over sampled tokens."""


class Updater:
    """Owns the parameters and the optimizer. Not thread-safe: call it from one thread.

    The model stays in evaluation mode: dropout would make the ratio to the behaviour policy differ from 1 on-policy.
    autocast: dtype of the matrix products (parameters and optimizer state keep their own), or None.
    """

    def __init__(self, model: nn.Module, algorithm: Algorithm, trainer: Trainer, autocast: torch.dtype | None = None) -> None:
        self.model = model.eval()
        self.writing = False
        self._algorithm = algorithm
        self._trainer = trainer
        self._autocast = autocast
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._dtype = self._parameters[0].dtype
        self._device = self._parameters[0].device
        self.optimizer = torch.optim.AdamW(
            self._parameters, lr=trainer.lr, betas=trainer.betas, weight_decay=trainer.weight_decay, fused=True
        )

    @property
    def signal(self) -> str | None:
        """What the teacher's column must hold, or None when the algorithm asks no teacher."""
        return self._algorithm.opd.signal if self._algorithm.wants_teacher() else None

    @property
    def policy_gradient(self) -> bool:
        return self._algorithm.name in ("grpo", "grpo_opd")

    def update(self, rows: Sequence[Row], step: int, lr: float | None = None) -> dict[str, Any]:
        """Train on rows (at least one) and return the step's figures. lr: the rate to use in place of the schedule's.

        Raises StageFailed, before anything is written, when the teacher's columns reach too few tokens.
        """
        coverage = self._check_coverage(rows, step)
        lr = learning_rate(self._trainer, step) if lr is None else lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        tally, norms = Tally(), []
        for turn in range(self._algorithm.passes):
            for batch in split_minibatches(rows, self._trainer.minibatches, (self._trainer.seed, step, turn)):
                norms.append(self._optimizer_step(batch, tally))
        self.writing = False
        return self._figures(rows, tally, norms) | {"lr": lr, "teacher_coverage": coverage}

    def digest(self) -> str:
        """Eight hex digits that differ when any parameter differs: cheap evidence that a replay is exact."""
        check = 0
        for parameter in self._parameters:
            data = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            check = zlib.crc32(data, check)
        return f"{check:08x}"

    def _check_coverage(self, rows: Sequence[Row], step: int) -> float | None:
        if self.signal is None:
            return None
        tokens = sum(len(row.positions) for row in rows)
        coverage = sum(int(row.covered.sum()) for row in rows) / tokens
        if coverage < self._trainer.min_teacher_coverage:
            missing = [row.sample_id for row in rows if not row.covered.all()]
            raise StageFailed(
                "trainer",
                f"step {step}: teacher columns (signal {self.signal!r}) reach {coverage:.3f} of {tokens} trained tokens, below"
                f" trainer.min_teacher_coverage {self._trainer.min_teacher_coverage}; samples {missing[:5]}",
            )
        return coverage

    def _optimizer_step(self, rows: Sequence[Row], tally: Tally) -> float | None:
        """Gradient norm before clipping; None: it was not finite, and nothing was written."""
        normaliser = Normaliser.of(rows, by_sequence=self._algorithm.grpo.aggregate == "sequence")
        chunks = [
            build_chunk(part, normaliser, self._dtype, self._device)
            for part in split_chunks(rows, self._trainer.max_tokens_per_chunk)
        ]
        moments = self._moments(chunks) if len(chunks) > 1 and self._centred else None
        self.optimizer.zero_grad(set_to_none=True)
        for chunk in chunks:
            loss = self._loss(chunk, moments, tally)
            loss.backward()
        norm = float(nn.utils.clip_grad_norm_(self._parameters, self._trainer.clip_norm))
        if known(norm) is None:
            tally.add(nonfinite_steps=1)
            return None
        self.writing = True
        self.optimizer.step()
        tally.add(optimizer_steps=1)
        return norm

    @property
    def _centred(self) -> bool:
        return self.signal == "sampled" and self._algorithm.opd.advantage != "raw"

    def _loss(self, chunk: Chunk, moments: tuple[Tensor, Tensor] | None, tally: Tally) -> Tensor:
        """This chunk's share of the loss: shares add up to the loss of the optimizer step."""
        logits_nv = self._logits(chunk)
        student_nv = torch.log_softmax(logits_nv, dim=-1)
        student_n, tempered_n = self._token_logprobs(chunk, logits_nv, student_nv)
        ratio_n = losses.importance_ratio(tempered_n, chunk.behaviour_n)
        loss = logits_nv.new_zeros(())
        if self.signal is not None:
            in_bounds_n = self._in_bounds(ratio_n)
            token_n = self._teacher_loss(chunk, student_nv, student_n, tempered_n, ratio_n, in_bounds_n, moments)
            part = (chunk.teacher_weight_n * torch.where(in_bounds_n, token_n, 0.0)).sum()
            loss = loss + self._algorithm.opd.coefficient * part
            self._count_teacher(tally, chunk, student_n, in_bounds_n, part)
        if self.policy_gradient:
            settings = self._algorithm.grpo
            token_n = losses.clipped_policy_gradient(ratio_n, chunk.advantage_n, settings.clip_low, settings.clip_high)
            part = (chunk.policy_weight_n * token_n).sum()
            loss = loss + settings.coefficient * part
            self._count_policy(tally, chunk, ratio_n, part)
        if self._algorithm.imitates():
            loss = loss + self._imitation(chunk, student_n, tempered_n, tally)
        self._count_tokens(tally, ratio_n[chunk.anchor_weight_n > 0], student_nv)
        tally.add(loss=float(loss.detach()))
        return loss

    def _imitation(self, chunk: Chunk, student_n: Tensor, tempered_n: Tensor, tally: Tally) -> Tensor:
        """Cross-entropy on what is imitated; `aggrevate` holds the student's own tokens near the policy that drew them."""
        settings = self._algorithm.imitation
        part = (chunk.imitation_weight_n * losses.cross_entropy(student_n)).sum()
        tally.add(loss_imitation=float(part.detach()))
        loss = settings.coefficient * part
        if self._algorithm.name == "aggrevate":
            own_n = chunk.anchor_weight_n > 0
            held = (chunk.anchor_weight_n[own_n] * losses.anchor_kl(tempered_n[own_n], chunk.behaviour_n[own_n])).sum()
            tally.add(loss_anchor=float(held.detach()))
            loss = loss + settings.kl_coefficient * held
        return loss

    def _logits(self, chunk: Chunk) -> Tensor:
        """Logits of the trained tokens' predecessors, [n, v], at least float32 for what follows."""
        with torch.autocast(self._device.type, dtype=self._autocast, enabled=self._autocast is not None):
            logits_bcv = self.model(input_ids=chunk.tokens_bt, use_cache=False, logits_to_keep=chunk.columns_c).logits
        logits_nv = logits_bcv[chunk.row_n, chunk.column_n]
        return logits_nv if logits_nv.dtype == torch.float64 else logits_nv.float()

    def _token_logprobs(self, chunk: Chunk, logits_nv: Tensor, student_nv: Tensor) -> tuple[Tensor, Tensor]:
        """Logprobs of the sampled tokens at temperature 1, and at their sampling temperature."""
        student_n = student_nv.gather(1, chunk.target_n[:, None]).squeeze(1)
        if bool(((chunk.temperature_n == 1.0) | (chunk.temperature_n == 0.0)).all()):
            return student_n, student_n
        return student_n, losses.tempered_logprobs(logits_nv, chunk.target_n, chunk.temperature_n)

    def _in_bounds(self, ratio_n: Tensor) -> Tensor:
        return (ratio_n >= self._algorithm.opd.ratio_low) & (ratio_n <= self._algorithm.opd.ratio_high)

    def _teacher_loss(
        self,
        chunk: Chunk,
        student_nv: Tensor,
        student_n: Tensor,
        tempered_n: Tensor,
        ratio_n: Tensor,
        in_bounds_n: Tensor,
        moments: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        opd = self._algorithm.opd
        if opd.signal == "sampled":
            raw_n = losses.sampled_advantage(chunk.teacher_n, student_n)
            if self._centred and moments is None:
                moments = _mean_and_std(raw_n[in_bounds_n & (chunk.teacher_weight_n > 0)])
            advantage_n = losses.centre(raw_n, opd.advantage, *(moments or (0.0, 1.0)))
            return losses.sampled_reverse_kl(tempered_n, ratio_n, advantage_n, opd.ratio_truncate)
        forward = opd.direction == "forward"
        if opd.signal == "full":
            if chunk.full_nv is None:
                return student_n * 0.0
            return (losses.forward_kl if forward else losses.reverse_kl)(student_nv, chunk.full_nv)
        if chunk.topk_ids_nk is None or chunk.topk_logprobs_nk is None:
            return student_n * 0.0
        over_topk = losses.forward_kl_topk if forward else losses.reverse_kl_topk
        return over_topk(student_nv, chunk.topk_ids_nk, chunk.topk_logprobs_nk)

    @torch.no_grad()
    def _moments(self, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
        """Mean and deviation of the sampled advantage over all chunks of an optimizer step: one forward pass more, so that
        the result does not depend on how the rows were packed."""
        parts = []
        for chunk in chunks:
            logits_nv = self._logits(chunk)
            student_n, tempered_n = self._token_logprobs(chunk, logits_nv, torch.log_softmax(logits_nv, dim=-1))
            in_bounds_n = self._in_bounds(losses.importance_ratio(tempered_n, chunk.behaviour_n))
            raw_n = losses.sampled_advantage(chunk.teacher_n, student_n)
            parts.append(raw_n[in_bounds_n & (chunk.teacher_weight_n > 0)])
        return _mean_and_std(torch.cat(parts))

    @torch.no_grad()
    def _count_teacher(self, tally: Tally, chunk: Chunk, student_n: Tensor, in_bounds_n: Tensor, part: Tensor) -> None:
        covered_n = chunk.teacher_weight_n > 0
        tally.add(
            loss_opd=float(part),
            covered=float(covered_n.sum()),
            teacher_kl=float((student_n - chunk.teacher_n)[covered_n].sum()),
            masked=float((covered_n & ~in_bounds_n).sum()),
        )

    @torch.no_grad()
    def _count_policy(self, tally: Tally, chunk: Chunk, ratio_n: Tensor, part: Tensor) -> None:
        settings = self._algorithm.grpo
        counts_n = chunk.policy_weight_n > 0
        too_high_n = (ratio_n > 1.0 + settings.clip_high) & (chunk.advantage_n > 0)
        too_low_n = (ratio_n < 1.0 - settings.clip_low) & (chunk.advantage_n < 0)
        tally.add(
            loss_grpo=float(part),
            policy_tokens=float(counts_n.sum()),
            clipped=float((counts_n & (too_high_n | too_low_n)).sum()),
        )

    @torch.no_grad()
    def _count_tokens(self, tally: Tally, ratio_n: Tensor, student_nv: Tensor) -> None:
        # KL(mu || pi) by the estimator r - 1 - log r with r = pi / mu: unbiased, never negative (Schulman 2020, "k3").
        tally.add(tokens=len(student_nv), entropy=float(losses.entropy(student_nv).sum()))
        if not len(ratio_n):
            return
        tally.add(
            own_tokens=len(ratio_n),
            ratio=float(ratio_n.sum()),
            kl_behaviour=float((ratio_n - 1.0 - ratio_n.log()).sum()),
        )
        tally.top(ratio=float(ratio_n.max()))

    def _figures(self, rows: Sequence[Row], tally: Tally, norms: Sequence[float | None]) -> dict[str, Any]:
        steps = len(norms)
        finite = [norm for norm in norms if norm is not None]
        per_step = {
            name: known(tally.sums[name] / steps) if name in tally.sums else None for name in FIGURES if name.startswith("loss")
        }
        return per_step | {
            "samples": len(rows),
            "tokens": sum(len(row.positions) for row in rows),
            "optimizer_steps": len(finite),
            "nonfinite_steps": steps - len(finite),
            "grad_norm": mean(finite),
            "entropy": tally.share("entropy", "tokens"),
            "kl_behaviour": tally.share("kl_behaviour", "own_tokens"),
            "ratio_mean": tally.share("ratio", "own_tokens"),
            "ratio_max": known(tally.maxima.get("ratio")),
            "ratio_masked_share": tally.share("masked", "covered"),
            "clipped_share": tally.share("clipped", "policy_tokens"),
            "teacher_kl": tally.share("teacher_kl", "covered"),
        }


def _mean_and_std(values_n: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, so that the split into chunks does not show; (0, 0) for no values."""
    if not len(values_n):
        return values_n.new_zeros(()), values_n.new_zeros(())
    wide_n = values_n.double()
    return wide_n.mean().to(values_n.dtype), wide_n.std(correction=0).to(values_n.dtype)

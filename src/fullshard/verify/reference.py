"""The reference of `fullshard verify`: training in one process without fullshard.

    python -P reference.py FOLDER ...

reads each job that `verify` wrote (job.json, config.json, weights, batches) and writes, for each of
its passes, losses, gradient norms, gradients and parameters of every step. It imports torch,
transformers and safetensors and nothing of fullshard, and has a loss, a clipping and a loop of its
own, so that a mistake in ours cannot be on both sides.

It computes the global token mean, as the recipes do: with S_ra the cross-entropy summed
over the label tokens of micro-batch a of rank r, and N the label tokens of all ranks together,

    own_r    = sum over a of d(W / N * S_ra)        the ranks' batches one after another
    gradient = (own_0 + own_1 + ...) / W

then clipping by the norm of the whole gradient, and one step of AdamW. The updated
parameters (masters) are separate from the compute parameters, which are cast from them before every
step.

A pass that is `wide` computes in float64 throughout. Otherwise transformers computes norms and
rotary positions in float32, in float64 models too, and another program agrees to 1e-7 only.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

Tensors = dict[str, torch.Tensor]
IGNORED = -100


def main() -> None:
    """Runs every pass of the jobs in the folders on the command line."""
    torch.set_num_threads(1)  # sums in the same order as on the ranks
    logging.set_verbosity_error()
    for folder in map(Path, sys.argv[1:]):
        job = json.loads((folder / "job.json").read_text())
        for settings in job["passes"]:
            run_pass(folder, job, settings)


def run_pass(folder: Path, job: dict[str, Any], settings: dict[str, Any]) -> None:
    """Trains as ranks with `num_batches` batches would, with the step after saving and loading.

    Args:
        folder: Folder of the job.
        job: Numbers of the job.
        settings: Dtypes of this pass.
    """
    training = _ReferenceTraining(folder, job, settings)
    for step in range(job["num_steps"]):
        training.step(step)
    training.write_state()
    training.step(job["num_steps"])
    target = folder / settings["name"]
    target.mkdir(exist_ok=True)
    save_file(training.tensors, target / "reference.safetensors")
    (target / "reference.json").write_text(json.dumps(training.numbers))


class _ReferenceTraining:
    """A model, its master weights and the results so far."""

    def __init__(self, folder: Path, job: dict[str, Any], settings: dict[str, Any]) -> None:
        self.job, self.settings = job, settings
        self.precision = Wide() if settings["wide"] else nullcontext()
        self.device = torch.device(job["device"])
        self.master_dtype = getattr(torch, settings["master_dtype"])
        self.compute_dtype = getattr(torch, settings["compute_dtype"])
        self.batches = load_file(folder / "batches.safetensors")
        self.model = self._build(folder)
        self.params = dict(self.model.named_parameters())
        self.masters = {
            name: nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
            for name, param in self.params.items()
        }
        self.tensors: Tensors = {}
        self.numbers: dict[str, Any] = {"losses": [], "loss": [], "norm": [], "ties": self._ties()}
        for param in self.params.values():
            param.data = param.data.to(self.compute_dtype)
        self.start_optimizer()

    def _build(self, folder: Path) -> nn.Module:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        extra = self.job["model_arguments"]
        with self.precision:  # of the frequencies of rotary positions
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=False, **extra
            )
        model.to(self.master_dtype)
        model.load_state_dict(load_file(folder / "weights.safetensors"))
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        for name, param in model.named_parameters():
            param.requires_grad_(name not in self.job["frozen"])
        return model.to(self.device).train()

    def _ties(self) -> list[list[str]]:
        """Groups of names that share one parameter, the first name first."""
        names: dict[int, list[str]] = {}
        for name, param in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
        return [group for group in names.values() if len(group) > 1]

    def start_optimizer(self) -> None:
        """Creates AdamW, without moments yet, for all trained masters."""
        numbers = self.job["optimizer"]
        trained = [master for master in self.masters.values() if master.requires_grad]
        self.optimizer = torch.optim.AdamW(
            trained,
            lr=numbers["learning_rate"],
            betas=(numbers["beta1"], numbers["beta2"]),
            eps=numbers["epsilon"],
            weight_decay=numbers["weight_decay"],
            foreach=False,
        )

    def step(self, step: int) -> None:
        """Computes every rank's gradient and their mean, clips it and updates once."""
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(self.masters[name])
        num_batches = self.job["num_batches"]
        num_tokens = sum(
            int((labels[:, 1:] != IGNORED).sum())
            for key, labels in self.batches.items()
            if key.startswith(f"{step}.") and key.endswith(".labels")
        )
        total: Tensors = {}
        losses = []
        for rank in range(num_batches):
            sums, own = self._play_rank(step, rank, num_batches / num_tokens)
            losses.append(sums)
            for name, gradient in own.items():
                if step in self.job["written_steps"]:
                    self.tensors[f"{step}/own/{rank}/{name}"] = gradient.cpu()
                total[name] = gradient.clone() if name not in total else total[name] + gradient
        gradients = {name: gradient / num_batches for name, gradient in total.items()}
        self.numbers["losses"].append(losses)
        self.numbers["loss"].append(sum(map(sum, losses)) / num_tokens)
        self.numbers["norm"].append(self._update(step, gradients))

    def _play_rank(self, step: int, rank: int, scale: float) -> tuple[list[float], Tensors]:
        """A rank's summed loss of each micro-batch, and its part of the gradient times W."""
        sums: list[float] = []
        own: Tensors = {}
        for micro in range(self.job["num_micro_batches"]):
            prefix = f"{step}.{rank}.{micro}"
            ids, labels = (
                self.batches[f"{prefix}.{kind}"].to(self.device) for kind in ("input_ids", "labels")
            )
            with self.precision:
                logits = self.model(input_ids=ids, use_cache=False).logits
            loss = summed_loss(logits, labels)
            (loss * (scale * self.settings["loss_scale"])).backward()
            sums.append(float(loss.detach()))
            for name, param in self.params.items():
                if param.grad is not None:
                    gradient = param.grad.to(getattr(torch, self.settings["reduce_dtype"]))
                    gradient = gradient.to(self.master_dtype) / self.settings["loss_scale"]
                    own[name] = gradient if name not in own else own[name] + gradient
                    param.grad = None
        return sums, own

    def _update(self, step: int, gradients: Tensors) -> float:
        """Clips, updates the masters and records them; returns the norm."""
        squares = [float(gradient.double().square().sum()) for gradient in gradients.values()]
        norm = sum(squares) ** 0.5
        max_norm = self.job["max_grad_norms"][step == self.job["num_steps"]]
        factor = min(1.0, max_norm / (norm + 1e-6))
        for name, gradient in gradients.items():
            self.masters[name].grad = gradient * factor
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if step in self.job["written_steps"]:
            for name, gradient in gradients.items():
                self.tensors[f"{step}/gradient/{name}"] = gradient.cpu().contiguous()
            for name, master in self.masters.items():
                self.tensors[f"{step}/parameter/{name}"] = master.detach().cpu().clone()
        return norm

    def write_state(self) -> None:
        """Records the trained state dict, with all names of tied weights."""
        first = {id(param): name for name, param in self.params.items()}
        named = dict(self.model.named_parameters(remove_duplicate=False))
        for key, value in self.model.state_dict().items():
            whole = self.masters[first[id(named[key])]] if key in named else value
            self.tensors[f"state/{key}"] = whole.detach().cpu().clone()


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Next-token cross-entropy summed over the labels that count.

    Args:
        logits: (batch, length, vocabulary).
        labels: (batch, length), -100 where nothing is to be predicted.
    """
    logits = logits[:, :-1]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    targets = labels[:, 1:]
    counts = targets != IGNORED
    chosen = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return ((torch.logsumexp(logits, -1) - chosen) * counts).sum()


class Wide(TorchFunctionMode):
    """Inside, functions of torch that are asked for float32 compute in float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls the function with float64 in place of float32."""
        del types
        func = torch.Tensor.double if func is torch.Tensor.float else func
        named = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widened, args), **named)


def _widened(value: object) -> object:
    return torch.float64 if value is torch.float32 else value


if __name__ == "__main__":
    main()

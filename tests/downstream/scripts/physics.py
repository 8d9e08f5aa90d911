"""A physics-informed network of `pina` on Poisson's equation, as its tutorials train it."""

import os

import torch
from lightning import seed_everything
from pina import Condition, Trainer
from pina.domain import CartesianDomain
from pina.equation import Equation, FixedValue
from pina.model import FeedForward
from pina.operator import laplacian
from pina.problem import SpatialProblem
from pina.solver import PINN

import lightning_replica  # noqa: F401


def poisson(points, solution):
    force = torch.sin(points.extract(["x"]) * torch.pi) * torch.sin(points.extract(["y"]) * torch.pi)
    return laplacian(solution, points, components=["u"], d=["x", "y"]) - force


class Poisson(SpatialProblem):
    output_variables = ["u"]
    spatial_domain = CartesianDomain({"x": [0, 1], "y": [0, 1]})
    domains = {
        "edge": CartesianDomain({"x": [0, 1], "y": 1.0}),
        "inside": CartesianDomain({"x": [0, 1], "y": [0, 1]}),
    }
    conditions = {
        "edge": Condition(domain="edge", equation=FixedValue(0.0)),
        "inside": Condition(domain="inside", equation=Equation(poisson)),
    }


seed_everything(1)
problem = Poisson()
problem.discretise_domain(16, "random", domains="edge")
problem.discretise_domain(48, "random", domains="inside")
solver = PINN(problem, FeedForward(input_dimensions=2, output_dimensions=1, layers=[16, 16]))
trainer = Trainer(
    solver,
    batch_size=8,
    strategy=os.environ["WILD_STRATEGY"],
    accelerator="cpu",
    devices=2,
    max_epochs=4,
    enable_progress_bar=False,
)
trainer.train()

"""MovieLens latest-small (September 2018): ratings of movies by users."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tam.lab.data.files import DataError, Download, File, Layout

# The md5s are those of the files in the archive, of which its authors publish one for the whole.
SMALL = Layout(
    "MovieLens latest-small (ml-latest-small/ratings.csv, movies.csv)",
    (
        File("ml-latest-small/ratings.csv", "325a6f09399d1c45671f187505e1a100"),
        File("ml-latest-small/movies.csv", "ed94fab72b62442ef8150d9446e000d6"),
    ),
    (Download("https://files.grouplens.org/datasets/movielens/ml-latest-small.zip"),),
)


@dataclass(frozen=True)
class Ratings:
    """Who rated what, how."""

    users: Tensor  # numbered from 0
    movies: Tensor
    values: Tensor
    genres: Tensor  # of each movie, 0 or 1
    titles: list[str]

    @property
    def counts(self) -> tuple[int, int]:
        """Users and movies."""
        return int(self.users.max()) + 1, len(self.titles)


def read(folder: Path) -> Ratings:
    """The ratings; users and movies numbered in the order of their ids."""
    movies = _rows(folder / SMALL.files[1].path, ("movieId", "title", "genres"))
    ratings = _rows(folder / SMALL.files[0].path, ("userId", "movieId", "rating"))
    try:
        place = {int(row[0]): i for i, row in enumerate(movies)}
        names = {user: i for i, user in enumerate(sorted({int(row[0]) for row in ratings}))}
        users = torch.tensor([names[int(row[0])] for row in ratings])
        rated = torch.tensor([place[int(row[1])] for row in ratings])
        values = torch.tensor([float(row[2]) for row in ratings])
    except (ValueError, KeyError) as error:
        raise DataError(
            f"movielens: {folder / 'ml-latest-small'} has something else than ratings: {error}"
        ) from error
    sets = [row[2].split("|") for row in movies]
    kinds = sorted({kind for found in sets for kind in found})
    genres = torch.tensor([[float(kind in found) for kind in kinds] for found in sets])
    return Ratings(users, rated, values, genres, [row[1] for row in movies])


def _rows(path: Path, columns: tuple[str, ...]) -> list[list[str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            found = list(csv.DictReader(file))
        return [[row[column] for column in columns] for row in found]
    except (OSError, UnicodeDecodeError, KeyError, csv.Error) as error:
        raise DataError(f"movielens: {path} cannot be read: {error!r}") from error

"""MovieLens latest-small (September 2018): ratings of movies by users."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tam.lab.core.errors import DataError

FOLDER = "ml-latest-small"


@dataclass(frozen=True)
class Ratings:
    """Ratings of movies by users."""

    users: Tensor  # numbered from 0
    movies: Tensor
    values: Tensor
    genres: Tensor  # of each movie, 0 or 1
    titles: list[str]

    @property
    def counts(self) -> tuple[int, int]:
        """The number of users and of movies."""
        return int(self.users.max()) + 1, len(self.titles)


def read(folder: Path) -> Ratings:
    """Return the ratings. Users and movies are numbered in the order of their ids."""
    movies = _read_columns(folder / FOLDER / "movies.csv", ("movieId", "title", "genres"))
    ratings = _read_columns(folder / FOLDER / "ratings.csv", ("userId", "movieId", "rating"))
    try:
        movie_numbers = {int(row[0]): i for i, row in enumerate(movies)}
        user_numbers = {user: i for i, user in enumerate(sorted({int(row[0]) for row in ratings}))}
        users = torch.tensor([user_numbers[int(row[0])] for row in ratings])
        rated_movies = torch.tensor([movie_numbers[int(row[1])] for row in ratings])
        values = torch.tensor([float(row[2]) for row in ratings])
    except (ValueError, KeyError) as error:
        raise DataError(f"movielens: {folder / FOLDER} does not hold ratings: {error}") from error
    genre_lists = [row[2].split("|") for row in movies]
    names = sorted({name for genres in genre_lists for name in genres})
    genres = torch.tensor([[float(name in genres) for name in names] for genres in genre_lists])
    return Ratings(users, rated_movies, values, genres, [row[1] for row in movies])


def _read_columns(path: Path, columns: tuple[str, ...]) -> list[list[str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [[row[column] for column in columns] for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, KeyError, csv.Error) as error:
        raise DataError(f"movielens: {path} cannot be read: {error!r}") from error

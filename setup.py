"""Installation of the package. Horovod is not required here: pip cannot build it; launch/setup.sh can."""

from setuptools import find_packages, setup

INSTALL_REQUIRES = [
    "cffi>=1.15",  # Horovod's, at run time
    "cloudpickle>=3",  # Horovod's
    "Jinja2>=3.1",
    "matplotlib>=3.8",
    "mpi4py>=4",
    "numba>=0.60",
    "numpy>=1.26",
    "packaging>=23",  # Horovod's
    "pillow>=10",
    "psutil>=5.9",  # Horovod's
    "pydantic>=2.6",
    "PyYAML>=6",
    "rich>=13",
    "scikit-learn>=1.4",
    "scipy>=1.11",
    "setuptools>=68",  # Horovod's
    "tensorboard>=2.16",
    "torch>=2.2",
    "typer>=0.12",
]

DEV_REQUIRES = [
    "hypothesis>=6.100",
    "mypy>=1.10",
    "pytest>=8",
    "pytest-timeout>=2.3",
    "ruff>=0.6",
    "types-PyYAML>=6",
]

setup(
    name="hvdcomp",
    version="0.1.0",
    description="Adaptive gradient compression for Horovod and PyTorch",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["hvdcomp", "hvdcomp.*"]),
    package_data={"hvdcomp": ["py.typed"], "hvdcomp.report": ["page.html"]},
    install_requires=INSTALL_REQUIRES,
    extras_require={"dev": DEV_REQUIRES},
    entry_points={"console_scripts": ["hvdcomp = hvdcomp.cli:main"]},
)

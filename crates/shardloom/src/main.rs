//! The `shardloom` command.
#![forbid(unsafe_code)]

use clap::{Args, Parser, Subcommand};
use shardloom::launch::{self, Flags, error_file};
use shardloom::{Result, Run};
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "shardloom", version, about = "Fully sharded data parallel training")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Trains a model
    Train(RunArgs),
    /// Starts and watches one process per rank on this node, with torchrun's flags
    Launch(Box<Flags>),
    /// Shows what each rank will hold and send, before anything is allocated
    Plan(RunArgs),
}

#[derive(Args)]
struct RunArgs {
    /// The run's configuration
    run: PathBuf,
    /// How many ranks to start on this machine
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    ranks: u32,
    /// Overrides a key of the configuration, as in train.steps=10
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("shardloom: {error}");
            ExitCode::from(error.exit_status())
        }
    }
}

fn run(cli: Cli) -> Result<()> {
    match cli.command {
        Command::Train(args) => reported(|| shardloom::train(&args.load()?, args.ranks as usize)),
        Command::Launch(flags) => launch::launch(*flags),
        Command::Plan(args) => {
            print!("{}", shardloom::plan(&args.load()?, args.ranks as usize)?);
            Ok(())
        }
    }
}

/// A rank's failure is also left for the launcher that started it.
fn reported(rank: impl FnOnce() -> Result<()>) -> Result<()> {
    error_file::write_on_panic();
    rank().inspect_err(|error| error_file::write(&error.to_string()))
}

impl RunArgs {
    fn load(&self) -> Result<Run> {
        Run::load(&self.run, &self.set)
    }
}

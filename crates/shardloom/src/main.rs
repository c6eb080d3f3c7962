//! The `shardloom` command.
#![forbid(unsafe_code)]

use clap::{Args, Parser, Subcommand};
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
    /// Shows what each rank will hold and send, before anything is allocated
    Plan(RunArgs),
    /// Prepares training data, and shows it
    #[command(subcommand)]
    Data(DataCommand),
}

#[derive(Subcommand)]
enum DataCommand {
    /// Writes a packed-token file, to be trained on with data.kind = "tokens"
    Tokenize {
        /// .txt or .jsonl files, folders of them, or patterns
        #[arg(required = true, value_name = "IN")]
        inputs: Vec<String>,
        /// A folder with a tokenizer.json (and the model's config.json), or "bytes"
        #[arg(long, value_name = "DIR")]
        tokenizer: String,
        /// The file to write
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
    },
    /// Shows what a batch of a run looks like
    Inspect {
        /// The run's configuration
        run: PathBuf,
        /// The step whose batch is shown, from 1
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
        step: u64,
        /// How many of its rows are shown
        #[arg(long, default_value_t = 4)]
        rows: usize,
        /// Overrides a key of the configuration, as in data.seed=1
        #[arg(long = "set", value_name = "KEY=VALUE")]
        set: Vec<String>,
    },
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
        Command::Train(args) => shardloom::train(&args.load()?, args.ranks as usize),
        Command::Plan(args) => {
            print!("{}", shardloom::plan(&args.load()?, args.ranks as usize)?);
            Ok(())
        }
        Command::Data(DataCommand::Tokenize { inputs, tokenizer, out }) => {
            eprintln!("{}", shardloom::data::tokenize(&inputs, &tokenizer, &out)?);
            Ok(())
        }
        Command::Data(DataCommand::Inspect { run, step, rows, set }) => {
            print!("{}", shardloom::data::inspect(&Run::load(&run, &set)?, step, rows)?);
            Ok(())
        }
    }
}

impl RunArgs {
    fn load(&self) -> Result<Run> {
        Run::load(&self.run, &self.set)
    }
}

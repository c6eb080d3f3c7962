//! The `shardloom` command.
#![forbid(unsafe_code)]

use clap::{Args, Parser, Subcommand, ValueEnum};
use shardloom::device::Dtype;
use shardloom::generate::Sampling;
use shardloom::run::DeviceChoice;
use shardloom::{Generate, Result, Run};
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
    /// Continues a prompt with a trained model
    Generate(GenerateArgs),
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

#[derive(Args)]
struct GenerateArgs {
    /// A Hugging Face folder, as training writes to OUTPUT/model
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// What to continue
    #[arg(long)]
    prompt: String,
    /// New tokens at most
    #[arg(long, default_value_t = 128, value_name = "N")]
    max_tokens: usize,
    /// How much chance: 0 always takes the likeliest token
    #[arg(long, default_value_t = 0.0, value_name = "T")]
    temperature: f64,
    /// Chooses among this many of the likeliest tokens only (0: all)
    #[arg(long, default_value_t = 0, value_name = "K")]
    top_k: usize,
    /// Chooses among the likeliest tokens that together have this probability only
    #[arg(long, default_value_t = 1.0, value_name = "P")]
    top_p: f64,
    /// The same seed gives the same text
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[arg(long, default_value = "auto")]
    device: Place,
    /// Dtype of weights and activations [default: f32 on the CPU, bf16 on a GPU]
    #[arg(long)]
    dtype: Option<Float>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Place {
    Auto,
    Cpu,
    Cuda,
}

#[derive(Clone, Copy, ValueEnum)]
enum Float {
    F32,
    Bf16,
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
        Command::Generate(args) => generate(&args.resolve()),
    }
}

/// Text goes to standard output, how fast it came to standard error.
fn generate(args: &Generate) -> Result<()> {
    let done = shardloom::generate(args, &mut std::io::stdout().lock())?;
    let rate = |tokens: usize, seconds: f64| tokens as f64 / seconds.max(1e-9);
    eprintln!(
        "prompt: {} tokens at {:.0} tokens/s; new: {} tokens at {:.1} tokens/s",
        done.prompt_tokens,
        rate(done.prompt_tokens, done.prompt_s),
        done.new_tokens,
        rate(done.new_tokens, done.new_s)
    );
    Ok(())
}

impl GenerateArgs {
    fn resolve(self) -> Generate {
        let GenerateArgs { temperature, top_k, top_p, seed, .. } = self;
        Generate {
            model: self.model,
            prompt: self.prompt,
            max_tokens: self.max_tokens,
            sampling: Sampling { temperature, top_k, top_p, seed },
            device: match self.device {
                Place::Auto => DeviceChoice::Auto,
                Place::Cpu => DeviceChoice::Cpu,
                Place::Cuda => DeviceChoice::Cuda,
            },
            dtype: self.dtype.map(|dtype| match dtype {
                Float::F32 => Dtype::F32,
                Float::Bf16 => Dtype::Bf16,
            }),
        }
    }
}

impl RunArgs {
    fn load(&self) -> Result<Run> {
        Run::load(&self.run, &self.set)
    }
}

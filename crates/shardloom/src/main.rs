//! The `shardloom` command.
#![forbid(unsafe_code)]

use clap::{Args, Parser, Subcommand};
use device::Dtype;
use shardloom::bench::{self, CheckpointBench, StepBench};
use shardloom::checkpoints::{self, DcpExport, DcpImport, Export};
use shardloom::devices::Inventory;
use shardloom::generate::Sampling;
use shardloom::launch::{self, Flags, error_file};
use shardloom::run::DeviceChoice;
use shardloom::show::{self, Sheet};
use shardloom::{Error, Generate, Result, Resume, Run};
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
    Train(TrainArgs),
    /// Starts and watches one process per rank on this node, with torchrun's flags
    Launch(Box<Flags>),
    /// Goes through the checklist before a long run: a few real steps, a checkpoint and back, memory, speed
    Check {
        /// The run's configuration
        run: PathBuf,
        /// How many ranks to start on this machine
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
        ranks: u32,
        /// How many steps to make
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(3..))]
        steps: u64,
        /// Overrides a key of the configuration, as in shard.strategy=grad
        #[arg(long = "set", value_name = "KEY=VALUE")]
        set: Vec<String>,
    },
    /// Shows what each rank will hold and send, before anything is allocated
    Plan(PlanArgs),
    /// Looks into checkpoints, proves them, converts them
    #[command(subcommand)]
    Checkpoint(CheckpointCommand),
    /// Prepares training data, and shows it
    #[command(subcommand)]
    Data(DataCommand),
    /// Continues a prompt with a trained model
    Generate(GenerateArgs),
    /// Measures on this machine
    #[command(subcommand)]
    Bench(Bench),
    /// Shows what this machine offers: cores, GPUs, libraries found and missing
    Devices {
        /// Prints one JSON object
        #[arg(long)]
        json: bool,
    },
}

#[derive(Subcommand)]
enum Bench {
    /// Matrix products of a Llama's shapes
    Gemm {
        #[arg(long, default_value = "60m")]
        size: String,
        #[arg(long, default_value_t = 1024)]
        tokens: usize,
        #[arg(long, default_value = "f32", value_parser = dtype)]
        dtype: Dtype,
        #[arg(long, default_value = "auto", value_parser = device_choice)]
        device: DeviceChoice,
    },
    /// All-gather, reduce-scatter and all-reduce between ranks of this machine, beside a plain copy
    Collectives {
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
        ranks: u32,
        /// How they talk: processes over shared memory, sockets or (started by mpirun) MPI, or threads
        #[arg(long, default_value = "shm", value_parser = ["shm", "tcp", "local", "mpi"])]
        group: String,
    },
    /// Saving and loading a checkpoint, beside a plain write and read of as many bytes
    Checkpoint {
        /// tiny, 60m, 350m, 1b, 3b or 8b
        #[arg(long, default_value = "60m")]
        size: String,
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
        ranks: u32,
        /// A folder on the disk to be measured
        #[arg(long, default_value = ".")]
        dir: PathBuf,
        #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
        rounds: u32,
    },
    /// Whole training steps of a Llama with random weights and tokens
    Step {
        /// tiny, 60m, 350m, 1b, 3b or 8b
        #[arg(long, default_value = "60m")]
        size: String,
        #[arg(long, default_value_t = 256)]
        seq: usize,
        /// Rows a rank
        #[arg(long, default_value_t = 4)]
        rows: usize,
        #[arg(long, default_value_t = 8)]
        steps: usize,
        #[arg(long, default_value_t = 3)]
        warm_up: usize,
        #[arg(long, default_value_t = 1)]
        ranks: usize,
        /// Of activations and gathered weights
        #[arg(long, default_value = "f32", value_parser = dtype)]
        compute: Dtype,
        /// Of master weights, gradients and moments
        #[arg(long, default_value = "f32", value_parser = dtype)]
        master: Dtype,
        #[arg(long, default_value = "auto", value_parser = device_choice)]
        device: DeviceChoice,
        /// Tells kernels' times apart
        #[arg(long)]
        kernels: bool,
        /// Sets a key of the run, as in shard.strategy=none
        #[arg(long = "set", value_name = "KEY=VALUE")]
        set: Vec<String>,
    },
}

fn dtype(word: &str) -> std::result::Result<Dtype, String> {
    let known = [Dtype::F32, Dtype::Bf16, Dtype::F16];
    known.into_iter().find(|dtype| dtype.name() == word).ok_or_else(|| "one of f32, bf16, f16".into())
}

fn device_choice(word: &str) -> std::result::Result<DeviceChoice, String> {
    match word {
        "auto" => Ok(DeviceChoice::Auto),
        "cpu" => Ok(DeviceChoice::Cpu),
        "cuda" => Ok(DeviceChoice::Cuda),
        _ => Err("one of auto, cpu, cuda".into()),
    }
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

#[derive(Subcommand)]
enum CheckpointCommand {
    /// Shows what is inside: step, sizes, dtypes, who wrote it
    Inspect {
        /// A checkpoint, or a run's output folder, of which the last one is meant
        dir: PathBuf,
        /// Lists every tensor
        #[arg(long)]
        tensors: bool,
        /// Prints one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Reads every byte and holds it against the checksums
    Verify {
        /// A checkpoint, or a run's output folder, of which the last one is meant
        dir: PathBuf,
    },
    /// Writes a checkpoint for other programs: its weights as a Hugging Face folder, or all of it for PyTorch
    Export {
        /// A checkpoint, or a run's output folder, of which the last one is meant
        dir: PathBuf,
        /// hf: the weights as a Hugging Face folder; dcp: weights and AdamW's state as PyTorch's distributed checkpoint
        #[arg(long, default_value = "hf", value_parser = ["hf", "dcp"])]
        to: String,
        /// The folder to write
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Of the weights [default: as they are]
        #[arg(long, value_parser = dtype)]
        dtype: Option<Dtype>,
        /// Files have at most this many bytes
        #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = show::parse_bytes)]
        shard_size: usize,
        /// With --to dcp: over how many files tensors are spread [default: as many as ranks wrote it]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        files: Option<u32>,
    },
    /// Makes a checkpoint, to be resumed, of one that PyTorch, accelerate or torchtitan wrote
    Import {
        /// The folder with .metadata, or the one accelerate made
        dir: PathBuf,
        /// What it is: PyTorch's distributed checkpoint
        #[arg(long, default_value = "dcp", value_parser = ["dcp"])]
        from: String,
        /// The model: a Hugging Face folder, or a config.json
        #[arg(long, value_name = "PATH")]
        model: PathBuf,
        /// The folder to write
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Leaves the optimizer's state out: a folder to start from with model.path
        #[arg(long)]
        weights_only: bool,
    },
}

#[derive(Args)]
struct TrainArgs {
    /// The run's configuration
    run: PathBuf,
    /// How many ranks to start on this machine
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    ranks: u32,
    /// Goes on from the last checkpoint of the run, or from one that is named
    #[arg(long, value_name = "latest|DIR", num_args = 0..=1, default_missing_value = "latest")]
    resume: Option<String>,
    /// Overrides a key of the configuration, as in train.steps=10
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
}

#[derive(Args)]
struct PlanArgs {
    /// The run's configuration
    run: PathBuf,
    /// For how many ranks to plan
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    ranks: u32,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
    /// Says whether it fits on a device of this size, and what to change if not [default: this GPU's, if any]
    #[arg(long, value_name = "80GiB", value_parser = show::parse_bytes)]
    device_memory: Option<usize>,
    /// Overrides a key of the configuration, as in shard.strategy=grad
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
    #[arg(long, default_value = "auto", value_parser = device_choice)]
    device: DeviceChoice,
    /// Dtype of weights and activations [default: f32 on the CPU, bf16 on a GPU]
    #[arg(long, value_parser = dtype)]
    dtype: Option<Dtype>,
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
        Command::Train(args) => reported(|| args.train()),
        Command::Check { run, ranks, steps, set } => {
            reported(|| shardloom::check(&Run::load(&run, &set)?, ranks as usize, steps))
        }
        Command::Launch(flags) => launch::launch(*flags),
        Command::Plan(args) => {
            let sheet = args.sheet()?;
            print!("{}", if args.json { sheet.json() } else { sheet.text() });
            Ok(())
        }
        Command::Checkpoint(command) => checkpoint(command),
        Command::Generate(args) => generate(&args.resolve()),
        Command::Devices { json } => {
            let found = Inventory::take();
            print!("{}", if json { format!("{}\n", found.json()) } else { found.text() });
            Ok(())
        }
        Command::Bench(Bench::Gemm { size, tokens, dtype, device }) => {
            bench::gemm(dtype, device, tokens, &size)
        }
        Command::Bench(Bench::Collectives { ranks, group }) => {
            reported(|| bench::collectives(ranks as usize, &group))
        }
        Command::Bench(Bench::Checkpoint { size, ranks, dir, rounds }) => reported(|| {
            let (ranks, rounds) = (ranks as usize, rounds as usize);
            bench::checkpoint(&CheckpointBench { size, ranks, dir, rounds })
        }),
        Command::Bench(Bench::Step {
            size,
            seq,
            rows,
            steps,
            warm_up,
            ranks,
            compute,
            master,
            device,
            kernels,
            set,
        }) => {
            let dtype = compute;
            bench::step(&StepBench {
                size,
                seq,
                rows,
                steps,
                warm_up,
                ranks,
                dtype,
                master,
                device,
                set,
                kernels,
            })
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
            device: self.device,
            dtype: self.dtype,
        }
    }
}

/// A rank's failure is also left for the launcher that started it.
fn reported(rank: impl FnOnce() -> Result<()>) -> Result<()> {
    error_file::write_on_panic();
    rank().inspect_err(|error| error_file::write(&error.to_string()))
}

impl PlanArgs {
    fn sheet(&self) -> Result<Sheet> {
        let (run, note) = show::load(&self.run, &self.set)?;
        let device_bytes = self.device_memory.or_else(|| show::gpu_bytes(&run));
        let mut sheet = Sheet::new(&run, self.ranks as usize, device_bytes)?;
        sheet.notes.extend(note);
        Ok(sheet)
    }
}

impl TrainArgs {
    fn train(&self) -> Result<()> {
        let run = Run::load(&self.run, &self.set)?;
        shardloom::train_from(&run, self.ranks as usize, &Resume::parse(self.resume.as_deref()))
    }
}

fn checkpoint(command: CheckpointCommand) -> Result<()> {
    match command {
        CheckpointCommand::Inspect { dir, tensors, json } => {
            print!("{}", checkpoints::inspect(&dir, tensors, json)?);
        }
        CheckpointCommand::Verify { dir } => println!("{}", checkpoints::verify(&dir)?),
        CheckpointCommand::Export { dir, to, out, dtype, files, .. } if to == "dcp" => {
            if dtype.is_some() {
                return Err(Error::Config("--dtype is for --to hf: dcp has tensors as they are".into()));
            }
            let files = files.map(|files| files as usize);
            eprintln!("{}", checkpoints::export_dcp(&DcpExport { dir, out, files })?);
        }
        CheckpointCommand::Import { dir, model, out, weights_only, .. } => {
            eprintln!("{}", checkpoints::import_dcp(&DcpImport { dir, model, out, weights_only })?);
        }
        CheckpointCommand::Export { dir, out, dtype, shard_size, .. } => {
            let export = Export { dir, out, dtype, max_part_bytes: shard_size as u64 };
            eprintln!("{}", checkpoints::export(&export)?);
        }
    }
    Ok(())
}

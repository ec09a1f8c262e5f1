//! Samples a continuation of token ids: `generate MODEL SEED ID [ID ...]`.
//!
//! The declarations follow model.h; `bindgen model.h` writes them, too.

use std::ffi::{c_char, CStr, CString};
use std::marker::PhantomData;
use std::process::ExitCode;
use std::ptr;

mod bsm {
    use std::ffi::c_char;

    pub const OK: i32 = 0;
    const MESSAGE_BYTES: usize = 500;

    #[repr(C)]
    pub struct Error {
        pub status: i32,
        pub message: [c_char; MESSAGE_BYTES],
    }

    impl Error {
        pub fn new() -> Self {
            Error { status: OK, message: [0; MESSAGE_BYTES] }
        }
    }

    #[repr(C)]
    pub struct Sampling {
        pub temperature: f64,
        pub top_p: f64,
        pub min_p: f64,
        pub repeat_penalty: f64,
        pub top_k: i64,
        pub repeat_last_n: i64,
        pub bias_ids: *const i32,
        pub bias: *const f64,
        pub banned: *const i32,
        pub bias_count: i64,
        pub banned_count: i64,
        pub seed: u64,
        pub seed_words: *const u32,
        pub seed_count: i64,
        pub has_seed: i32,
        pub reserved: i32,
    }

    #[repr(C)]
    pub struct Info {
        pub name: *const c_char,
        pub target: *const c_char,
        pub abi_hash: *const c_char,
        pub weights_hash: *const c_char,
        pub vocab_size: i64,
        pub hidden_size: i64,
        pub context_length: i64,
        // More follows, which is not needed here.
    }

    pub enum Model {}
    pub enum Session {}
    pub enum Sampler {}

    extern "C" {
        pub fn bsm_describe() -> *const Info;
        pub fn bsm_open(
            path: *const c_char,
            options: *const u8,
            model: *mut *mut Model,
            error: *mut Error,
        ) -> i32;
        pub fn bsm_close(model: *mut Model);
        pub fn bsm_session_create(
            model: *mut Model,
            session: *mut *mut Session,
            error: *mut Error,
        ) -> i32;
        pub fn bsm_session_destroy(session: *mut Session);
        pub fn bsm_prefill(
            session: *mut Session,
            ids: *const i32,
            count: i64,
            error: *mut Error,
        ) -> i32;
        pub fn bsm_decode(session: *mut Session, id: i32, error: *mut Error) -> i32;
        pub fn bsm_sampler_create(
            options: *const Sampling,
            vocab_limit: i64,
            sampler: *mut *mut Sampler,
            error: *mut Error,
        ) -> i32;
        pub fn bsm_sampler_destroy(sampler: *mut Sampler);
        pub fn bsm_sample(
            session: *mut Session,
            sampler: *mut Sampler,
            id: *mut i32,
            error: *mut Error,
        ) -> i32;
    }
}

/// The call's status as a result, with the library's words.
fn checked(call: impl FnOnce(*mut bsm::Error) -> i32) -> Result<(), String> {
    let mut error = bsm::Error::new();
    if call(&mut error) == bsm::OK {
        return Ok(());
    }
    let words = unsafe { CStr::from_ptr(error.message.as_ptr()) };
    Err(words.to_string_lossy().into_owned())
}

fn text(words: *const c_char) -> String {
    unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned()
}

struct Model(*mut bsm::Model);

/// A conversation; it can't outlive its model.
struct Session<'a>(*mut bsm::Session, PhantomData<&'a Model>);

struct Sampler(*mut bsm::Sampler);

impl Model {
    fn open(path: &str) -> Result<Model, String> {
        let path = CString::new(path).map_err(|e| e.to_string())?;
        let mut model = ptr::null_mut();
        checked(|e| unsafe { bsm::bsm_open(path.as_ptr(), ptr::null(), &mut model, e) })?;
        Ok(Model(model))
    }

    fn session(&self) -> Result<Session<'_>, String> {
        let mut session = ptr::null_mut();
        checked(|e| unsafe { bsm::bsm_session_create(self.0, &mut session, e) })?;
        Ok(Session(session, PhantomData))
    }
}

impl Session<'_> {
    fn prefill(&mut self, ids: &[i32]) -> Result<(), String> {
        checked(|e| unsafe { bsm::bsm_prefill(self.0, ids.as_ptr(), ids.len() as i64, e) })
    }

    fn decode(&mut self, id: i32) -> Result<(), String> {
        checked(|e| unsafe { bsm::bsm_decode(self.0, id, e) })
    }

    fn sample(&mut self, sampler: &mut Sampler) -> Result<i32, String> {
        let mut id = 0;
        checked(|e| unsafe { bsm::bsm_sample(self.0, sampler.0, &mut id, e) })?;
        Ok(id)
    }
}

impl Sampler {
    fn new(temperature: f64, seed: u64) -> Result<Sampler, String> {
        let options = bsm::Sampling {
            temperature,
            top_p: 1.0,
            min_p: 0.0,
            repeat_penalty: 1.0,
            top_k: 0,
            repeat_last_n: -1,
            bias_ids: ptr::null(),
            bias: ptr::null(),
            banned: ptr::null(),
            bias_count: 0,
            banned_count: 0,
            seed,
            seed_words: ptr::null(),
            seed_count: 0,
            has_seed: 1,
            reserved: 0,
        };
        let vocab = unsafe { (*bsm::bsm_describe()).vocab_size };
        let mut sampler = ptr::null_mut();
        checked(|e| unsafe { bsm::bsm_sampler_create(&options, vocab, &mut sampler, e) })?;
        Ok(Sampler(sampler))
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        unsafe { bsm::bsm_close(self.0) }
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        unsafe { bsm::bsm_session_destroy(self.0) }
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        unsafe { bsm::bsm_sampler_destroy(self.0) }
    }
}

const WANTED: usize = 8;
const TEMPERATURE: f64 = 0.8;

fn run(words: &[String]) -> Result<(), String> {
    if words.len() < 4 {
        return Err(format!("usage: {} MODEL SEED ID [ID ...]", words[0]));
    }
    let seed = words[2].parse::<u64>().map_err(|e| e.to_string())?;
    let prompt: Result<Vec<i32>, _> = words[3..].iter().map(|w| w.parse::<i32>()).collect();
    let info = unsafe { &*bsm::bsm_describe() };
    eprintln!(
        "{}: vocabulary {}, context {}",
        text(info.name),
        info.vocab_size,
        info.context_length
    );
    let model = Model::open(&words[1])?;
    let mut session = model.session()?;
    let mut sampler = Sampler::new(TEMPERATURE, seed)?;
    session.prefill(&prompt.map_err(|e| e.to_string())?)?;
    for _ in 0..WANTED {
        let id = session.sample(&mut sampler)?;
        println!("{id}");
        session.decode(id)?;
    }
    Ok(())
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().collect();
    match run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

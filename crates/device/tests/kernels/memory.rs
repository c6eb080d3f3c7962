use super::harness::beds;
use device::{Dtype, Error, Stream};

#[test]
fn memory_is_aligned_counted_and_given_back() {
    for bed in &beds() {
        let before = bed.device.memory_use();
        let memory = bed.device.alloc(1000, "some").unwrap();
        let empty = bed.device.alloc(0, "none").unwrap();
        assert_eq!(memory.address() % 256, 0);
        assert_eq!((memory.bytes(), empty.bytes()), (1000, 0));
        let during = bed.device.memory_use();
        assert!(during.current_bytes >= before.current_bytes + 1000);
        drop((memory, empty));
        let after = bed.device.memory_use();
        assert_eq!(after.current_bytes, before.current_bytes);
        assert!(after.peak_bytes >= during.current_bytes);
    }
}

#[test]
fn no_room_is_an_error_that_names_what_was_wanted() {
    for bed in &beds() {
        let before = bed.device.memory_use().current_bytes;
        for bytes in [1 << 50, usize::MAX / 2, usize::MAX] {
            let error = bed.device.alloc(bytes, "the moon").unwrap_err();
            assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
            assert!(error.to_string().contains("the moon"), "{error}");
        }
        assert_eq!(bed.device.memory_use().current_bytes, before);
    }
}

#[test]
fn what_is_written_is_read_back() {
    for bed in &beds() {
        let buffer = bed.device.alloc_buffer(Dtype::U8, 100, "bytes").unwrap();
        let bytes: Vec<u8> = (0..50).collect();
        let part = buffer.slice(7, 50).unwrap();
        bed.device.write(&bed.stream, &bytes, &part).unwrap();
        assert_eq!(bed.device.read_vec::<u8>(&bed.stream, &part).unwrap(), bytes);
        assert!(bed.device.write(&bed.stream, &bytes, &buffer).is_err(), "too few bytes");
        assert!(bed.device.read(&bed.stream, &buffer, &mut [0; 99]).is_err(), "too little room");
    }
}

#[test]
fn the_device_knows_what_it_holds() {
    for bed in &beds() {
        if let Some(bytes) = bed.device.measured_bytes() {
            assert!(bytes > 1 << 18, "{}: {bytes}", bed.device.name());
        }
    }
}

#[test]
fn another_devices_stream_is_an_error() {
    for bed in &beds() {
        let buffer = bed.poisoned(Dtype::F32, 4);
        assert!(bed.device.fill(&Stream::Null, &buffer, 0.0).is_err());
        assert!(bed.device.write(&Stream::Null, &[0; 16], &buffer).is_err());
        assert!(bed.device.read(&Stream::Null, &buffer, &mut [0; 16]).is_err());
    }
}
